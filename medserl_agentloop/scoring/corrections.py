"""How close a correction is to the reference's: ROUGE-1, BERTScore and BLEURT, as in the shared task.

Called by ``metrics.py``. A scorer that cannot run says why; its score is then absent, never 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

BERTSCORE_MODEL = "microsoft/deberta-xlarge-mnli"
BLEURT_MODEL = "lucadiliello/BLEURT-20"
_BATCH = 16
_LONGEST = 512  # tokens of a sentence


class NotComputed(Exception):
    """Why a score is absent."""


Scorer = Callable[[Sequence[str], Sequence[str]], list[float]]
"""Takes predictions and references, none of them blank, and returns one number in [0, 1] per pair."""


def rouge_1(predictions: Sequence[str], references: Sequence[str]) -> list[float]:
    """ROUGE-1 F of the package ``rouge``, with which the shared task was scored.

    The package splits sentences at full stops and fails on a text of nothing else; such a text scores 0, and 1
    against itself.
    """
    try:
        from rouge import Rouge
    except ImportError as error:
        raise _no_package("rouge", "eval", error) from None
    rouge = Rouge(metrics=["rouge-1"], stats=["f"])

    def one(prediction: str, reference: str) -> float:
        if prediction.strip(".") and reference.strip("."):
            return float(rouge.get_scores(prediction, reference)[0]["rouge-1"]["f"])
        return float(prediction == reference)

    return [one(*pair) for pair in zip(predictions, references, strict=True)]


def bertscore(predictions: Sequence[str], references: Sequence[str]) -> list[float]:
    """BERTScore F1 by DeBERTa-XLarge-MNLI, rescaled with the baseline, clipped to [0, 1]."""
    try:
        from bert_score import BERTScorer

        if not predictions:
            return []
        scorer = BERTScorer(model_type=BERTSCORE_MODEL, lang="en", rescale_with_baseline=True)
        # The model's tokenizer states no limit, and transformers 5 cannot truncate to the huge number in its place.
        scorer._tokenizer.model_max_length = _LONGEST
        f1 = scorer.score(list(predictions), list(references))[2]
    except ImportError as error:
        raise _no_package("bert-score", "eval-neural", error) from None
    except Exception as error:  # a model that cannot be downloaded, too little memory, another version's interface
        raise NotComputed(f"{BERTSCORE_MODEL}: {_first_line(error)}") from None
    return [_clipped(value) for value in f1.tolist()]


def bleurt(predictions: Sequence[str], references: Sequence[str]) -> list[float]:
    """BLEURT-20 by its PyTorch port, clipped to [0, 1]."""
    try:
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
    except ImportError as error:
        raise _no_package("bleurt-pytorch", "eval-neural", error) from None
    except Exception as error:
        raise NotComputed(f"{BLEURT_MODEL}: {_first_line(error)}") from None
    return [_clipped(value) for value in scores]


def not_asked(predictions: Sequence[str], references: Sequence[str]) -> list[float]:
    """Stands for the two models where nobody asked for them: they are large."""
    raise NotComputed("ask for it with --neural")


SCORERS: Mapping[str, Scorer] = {"rouge_1": rouge_1, "bertscore": not_asked, "bleurt": not_asked}
NEURAL_SCORERS: Mapping[str, Scorer] = {"rouge_1": rouge_1, "bertscore": bertscore, "bleurt": bleurt}


def _no_package(package: str, extra: str, error: ImportError) -> NotComputed:
    if isinstance(error, ModuleNotFoundError) and error.name == package.replace("-", "_"):
        return NotComputed(f"the package {package} is not installed: pip install 'medserl-agentloop[{extra}]'")
    return NotComputed(f"the package {package} cannot be imported: {_first_line(error)}")


def _clipped(value: float) -> float:
    return max(0.0, min(1.0, value))


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
