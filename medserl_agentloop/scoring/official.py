"""What the shared task scores with: its scorers of corrections, and the arithmetic of its published script.

The arithmetic keeps the script's mistakes, for ``--official-bugs``; docs/evaluation.md lists them. It is written from
the script's behaviour: the script states no licence and is not part of this project.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from medserl_agentloop.paths import regular_file

BERTSCORE_MODEL = "microsoft/deberta-xlarge-mnli"
BLEURT_MODEL = "lucadiliello/BLEURT-20"
# The same range as the game's `canonical.IDEOGRAPHS`; scoring stays free of any game.
_IDEOGRAPH = re.compile("[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]")
_BATCH = 16
_LONGEST = 512  # tokens of a sentence

Scorer = Callable[[Sequence[str], Sequence[str]], Sequence[float] | str]
"""Takes predictions and references, none of them blank. Returns a number in [0, 1] per pair, or why there are none."""


def rouge_1(predictions: Sequence[str], references: Sequence[str]) -> list[float] | str:
    """ROUGE-1 F of the package ``rouge``, which the task used; texts of nothing but full stops score by equality.

    It compares what stands between blanks; in Chinese and Japanese, characters.
    """
    try:
        from rouge import Rouge
    except ImportError as error:
        return _no_package("rouge", "eval", error)
    rouge = Rouge(metrics=["rouge-1"], stats=["f"])

    def one(prediction: str, reference: str) -> float:
        if prediction.strip(".") and reference.strip("."):
            pair = (_IDEOGRAPH.sub(r" \g<0> ", text) for text in (prediction, reference))
            return float(rouge.get_scores(*pair)[0]["rouge-1"]["f"])
        return float(prediction == reference)

    return [one(*pair) for pair in zip(predictions, references, strict=True)]


def _bertscore(predictions: Sequence[str], references: Sequence[str]) -> Any:
    """BERTScore F1 by DeBERTa-XLarge-MNLI, rescaled with the baseline."""
    from bert_score import BERTScorer

    if not predictions:
        return []
    scorer = BERTScorer(model_type=BERTSCORE_MODEL, lang="en", rescale_with_baseline=True)
    # The model's tokenizer states no limit, and transformers 5 cannot truncate to the huge number in its place.
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
        pairs = (list(references[start : start + _BATCH]), list(predictions[start : start + _BATCH]))
        inputs = tokenizer(*pairs, padding="longest", truncation=True, max_length=_LONGEST, return_tensors="pt")
        with torch.inference_mode():
            scores += model(**inputs).logits.flatten().tolist()
    return scores


def _by_model(scorer: Callable[[Sequence[str], Sequence[str]], Any], package: str, model: str) -> Scorer:
    """A scorer clipped to [0, 1] that says why it cannot run."""

    def clipped(predictions: Sequence[str], references: Sequence[str]) -> list[float] | str:
        try:
            return [float(score) for score in np.clip(scorer(predictions, references), 0.0, 1.0)]
        except ImportError as error:
            return _no_package(package, "eval-neural", error)
        except Exception as error:  # a model that cannot be downloaded, too little memory, another version's interface
            return f"{model}: {_first_line(error)}"

    return clipped


def _not_asked(predictions: Sequence[str], references: Sequence[str]) -> str:
    return "ask for it with --neural"  # the two models are large


SCORERS: Mapping[str, Scorer] = {"rouge_1": rouge_1, "bertscore": _not_asked, "bleurt": _not_asked}
NEURAL_SCORERS: Mapping[str, Scorer] = {
    "rouge_1": rouge_1,
    "bertscore": _by_model(_bertscore, "bert-score", BERTSCORE_MODEL),
    "bleurt": _by_model(_bleurt, "bleurt-pytorch", BLEURT_MODEL),
}


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _no_package(package: str, extra: str, error: ImportError) -> str:
    install = f"pip install 'medserl-agentloop[{extra}]'"
    return f"the package {package} cannot be imported ({_first_line(error)}): {install}"


# --- the published script ---

_NA = "NA"
_LINE = re.compile(r"[a-z0-9\-]+\s[0-9]+\s-?[0-9]+\s.+")
_ROUGE = {"R1F": "rouge-1", "R2F": "rouge-2", "RLF": "rouge-l"}
_NAMES = {"bertscore": ("BERTSCORE_subset_check", "BERTC"), "bleurt": ("BLEURT_subset_check", "BLEURTC")}

_Facts = dict[Any, tuple[str, str, str]]  # flag, sentence and correction as text, by text id


def official_scores(
    reference: Path, submission: Path, scorers: Mapping[str, Scorer] = SCORERS
) -> dict[str, float | None] | str:
    """What the published script prints of a submission on MEDEC's CSV, by its own names, or how it stops."""
    try:
        return _scores(_reference(reference), _submission(submission), scorers)
    except ImportError as error:
        return _no_package("rouge", "eval", error)
    except (re.error, AssertionError, ValueError, KeyError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}".rstrip(": ")
        return f"the published script stops on {submission.name} with {reason}"


def _reference(path: Path) -> _Facts:
    """The reference as pandas reads it: blank records turn whole numbers into fractions, and are one more note."""
    import pandas

    table = pandas.read_csv(path)
    ids = table["Text ID"].where(table["Text ID"].notna(), None)
    flags, sentences = table["Error Flag"].astype(str), table["Error Sentence ID"].astype(str)
    corrections = table["Corrected Sentence"].where(table["Corrected Sentence"].notna(), _NA).astype(str)
    return dict(zip(ids, zip(flags, sentences, corrections, strict=True), strict=True))


def _submission(path: Path) -> _Facts:
    lines: _Facts = {}
    for line in regular_file(path).read_text("utf-8").split("\n"):
        line = line.strip()
        if not _LINE.fullmatch(line):
            continue
        # Meant to collapse white space in the line, but here the line is the template of the replacement: its
        # backslashes are read as escapes.
        text_id, flag, sentence, *words = re.sub(r"\s+", line, " ").split()
        correction = " ".join(words)
        correction = correction.lstrip('"') or correction[-1:]  # the last quote of a text of quotes stays
        correction = correction.rstrip('"') or correction[:1]
        lines[text_id] = flag, sentence, _NA if flag == "0" else correction
    return lines


def _scores(reference: _Facts, submission: _Facts, scorers: Mapping[str, Scorer]) -> dict[str, float | None]:
    from rouge import Rouge

    answered = [(right, submission[text_id]) for text_id, right in reference.items() if text_id in submission]
    pairs = [(right[2], given[2]) for right, given in answered if _NA not in (right[2], given[2])]
    both_na = sum(right[2] == given[2] == _NA for right, given in answered)
    result: dict[str, float | None] = {
        "Error Flags Accuracy": sum(right[0] == given[0] for right, given in answered) / len(reference),
        "Error Sentence Detection Accuracy": sum(right[1] == given[1] for right, given in answered) / len(reference),
    }

    def add(subset: str, composite: str, values: Any) -> None:
        result[subset] = float(values.mean()) if len(values) else None  # the script prints ``nan``
        result[composite] = float((values.sum() + both_na) / len(reference))

    references, predictions = [right for right, _ in pairs], [given for _, given in pairs]
    by_rouge = Rouge().get_scores(predictions, references)
    for short, name in _ROUGE.items():
        add(f"{short}_subset_check", f"{short}C", np.array([scores[name]["f"] for scores in by_rouge]))
    together = [np.array([scores["rouge-1"]["f"] for scores in by_rouge])]
    for name, names in _NAMES.items():
        scored = scorers[name](predictions, references)
        if isinstance(scored, str):
            return result
        together.append(np.array(scored))
        add(*names, together[-1])
    add("aggregate_subset_check", "AggregateC", np.sum(together, axis=0) / len(together))
    return result
