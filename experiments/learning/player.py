"""The tiny player: a byte-level tokenizer and a Qwen3 of about 1 M parameters.

Called by ``experiments.learning.train_tiny_player``, which trains it and measures what it can do.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from experiments.learning.transcripts import transcripts
from medserl_agentloop.games.medical.prompting import load_profile

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TAGS = ("<think>", "</think>", "<note>", "</note>", "<answer>", "</answer>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCABULARY = 1600

# Everyday clinical English, so that notes from elsewhere do not fall apart into single bytes.
GENERAL_TEXT = """\
A 45-year-old man comes to the emergency department because of chest pain and shortness of breath.
A 28-year-old woman is brought to the physician because of a 3-day history of fever, nausea and \
vomiting.
The patient has a history of hypertension, type 2 diabetes mellitus, asthma and hyperlipidemia.
His temperature is 38.5 C (101.3 F), pulse is 110/min, respirations are 22/min,
and blood pressure is 145/90 mm Hg.
Her vital signs are within normal limits. Oxygen saturation is 96% on room air.
Physical examination shows tenderness to palpation of the right lower abdomen without guarding or \
rebound.
Cardiac examination shows a systolic murmur at the left upper sternal border that radiates to the \
neck.
The lungs are clear to auscultation bilaterally. There is no edema of the lower extremities.
Neurologic examination shows weakness and decreased sensation of the left arm; reflexes are normal.
Laboratory studies show: hemoglobin 11.2 g/dL, leukocyte count 14,500/mm3, platelet count \
250,000/mm3.
Serum studies: sodium 138 mEq/L, potassium 4.2 mEq/L, creatinine 0.9 mg/dL, glucose 180 mg/dL,
calcium 9.4 mg/dL.
An x-ray of the chest shows an infiltrate in the lower lobe. A CT scan of the head shows no \
abnormalities.
An ECG shows sinus tachycardia with ST-segment elevation. An MRI of the spine is scheduled.
Current medications include aspirin, lisinopril, metformin, atorvastatin, insulin and an oral \
contraceptive.
He does not smoke cigarettes and drinks alcohol occasionally. He has no known allergies.
She was diagnosed with an infection two weeks ago and treated with an antibiotic for seven days.
The symptoms began 6 months ago and have gotten progressively worse over the past several weeks.
Treatment with intravenous fluids and antibiotics is started, and the patient is admitted to the \
hospital.
A diagnosis of acute myocardial infarction is made. Surgery was performed without complications.
Blood cultures were obtained before therapy was given. Gram stain shows gram-positive cocci in \
clusters.
The child has received all immunizations. She is at the 50th percentile for height and weight.
Biopsy of the lesion shows inflammation. Urine pregnancy test is negative;
the last menstrual period was 4 weeks ago.
Family history is significant for cancer, stroke and coronary artery disease in his father and \
mother.
The patient was discharged home with instructions to follow up with the primary care physician.
"""


def _clinic_texts(count: int) -> Iterator[str]:
    """Prompts and answers as the player meets them, without the tags (they are tokens already)."""
    profile = load_profile("medserl")
    for example in itertools.islice(transcripts(seed=0), count):
        [message] = profile.messages(example.role, example.category, example.note)
        text = f"user\n{message['content']}\nassistant\n{example.answer}"
        for tag in TAGS:
            text = text.replace(tag, "\0")
        yield from filter(None, text.split("\0"))


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with a ChatML template; any text encodes and decodes unchanged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(TAGS),
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    general = GENERAL_TEXT.splitlines() * 40  # against some 2,000 prompts of their own words
    tokenizer.train_from_iterator([*_clinic_texts(2000), *general], trainer)
    # Plain tokens, not special ones: a player's tags are text that the game reads.
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """An untrained Qwen3 with tied embeddings."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.05,
    )
    return Qwen3ForCausalLM(config)


def save_player(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write weights (bfloat16), tokenizer and configuration."""
    rounded = Qwen3ForCausalLM(model.config).to(torch.bfloat16)
    rounded.load_state_dict(model.state_dict())
    rounded.generation_config.eos_token_id = tokenizer.eos_token_id
    rounded.generation_config.pad_token_id = tokenizer.pad_token_id
    rounded.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # Names that both Transformers 4 and 5 read; what 5 writes by itself, 4 does not know.
    path = folder / "tokenizer_config.json"
    settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings["additional_special_tokens"] = settings.pop("extra_special_tokens", [TURN_START])
    for name in ("backend", "is_local", "local_files_only"):
        settings.pop(name, None)
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
