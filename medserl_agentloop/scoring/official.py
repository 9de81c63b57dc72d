"""The scorers of corrections that the shared task has: ROUGE-1, BERTScore and BLEURT."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from medserl_agentloop.scoring.notes import spaced

BERTSCORE_MODEL = "microsoft/deberta-xlarge-mnli"
BLEURT_MODEL = "lucadiliello/BLEURT-20"
_BATCH = 16
_LONGEST = 512  # tokens of a sentence

Scorer = Callable[[Sequence[str], Sequence[str]], Sequence[float] | str]
"""Takes predictions and references, none of them blank.

Returns a number in [0, 1] per pair, or why there are none.
"""


def _rouge_1(predictions: Sequence[str], references: Sequence[str]) -> list[float]:
    """ROUGE-1 F of the package ``rouge``, which the task used; texts of nothing but full stops
    score by equality.

    It compares what stands between blanks; in Chinese and Japanese, characters.
    """
    from rouge import Rouge

    rouge = Rouge(metrics=["rouge-1"], stats=["f"])

    def one(prediction: str, reference: str) -> float:
        if prediction.strip(".") and reference.strip("."):
            return float(rouge.get_scores(spaced(prediction), spaced(reference))[0]["rouge-1"]["f"])
        return float(prediction == reference)

    return [one(*pair) for pair in zip(predictions, references, strict=True)]


def _bertscore(predictions: Sequence[str], references: Sequence[str]) -> Any:
    """BERTScore F1 by DeBERTa-XLarge-MNLI, rescaled with the baseline."""
    from bert_score import BERTScorer

    if not predictions:
        return []
    scorer = BERTScorer(model_type=BERTSCORE_MODEL, lang="en", rescale_with_baseline=True)
    # The model's tokenizer states no limit, and transformers 5 cannot truncate to the huge number
    # in its place.
    scorer._tokenizer.model_max_length = _LONGEST
    return scorer.score(list(predictions), list(references))[2]


def _bleurt(predictions: Sequence[str], references: Sequence[str]) -> Any:
    """BLEURT-20 by its PyTorch port."""
    import torch
    from bleurt_pytorch import BleurtForSequenceClassification, BleurtTokenizer

    model = BleurtForSequenceClassification.from_pretrained(BLEURT_MODEL).eval()
    tokenizer = BleurtTokenizer.from_pretrained(BLEURT_MODEL)
    scores: list[float] = []
    for start in range(0, len(predictions), _BATCH):
        pairs = (
            list(references[start : start + _BATCH]),
            list(predictions[start : start + _BATCH]),
        )
        inputs = tokenizer(
            *pairs, padding="longest", truncation=True, max_length=_LONGEST, return_tensors="pt"
        )
        with torch.inference_mode():
            scores += model(**inputs).logits.flatten().tolist()
    return scores


def _guarded(
    scorer: Callable[[Sequence[str], Sequence[str]], Any], package: str, extra: str, called: str
) -> Scorer:
    """A scorer clipped to [0, 1] that says why it cannot run."""

    def clipped(predictions: Sequence[str], references: Sequence[str]) -> list[float] | str:
        try:
            return [float(score) for score in np.clip(scorer(predictions, references), 0.0, 1.0)]
        # a model that cannot be downloaded, too little memory, another version's interface
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            if isinstance(error, ImportError):
                install = f"pip install 'medserl-agentloop[{extra}]'"
                return f"the package {package} cannot be imported ({reason}): {install}"
            return f"{called}: {reason}"

    return clipped


def _not_asked(predictions: Sequence[str], references: Sequence[str]) -> str:
    return "ask for it with --neural"  # the two models are large


_ROUGE = {"rouge_1": _guarded(_rouge_1, "rouge", "eval", "ROUGE-1")}
SCORERS: Mapping[str, Scorer] = {**_ROUGE, "bertscore": _not_asked, "bleurt": _not_asked}
NEURAL_SCORERS: Mapping[str, Scorer] = {
    **_ROUGE,
    "bertscore": _guarded(_bertscore, "bert-score", "eval-neural", BERTSCORE_MODEL),
    "bleurt": _guarded(_bleurt, "bleurt-pytorch", "eval-neural", BLEURT_MODEL),
}
