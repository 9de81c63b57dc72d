"""The files of a data set: what ``medserl data convert`` keeps out of them, their declared columns, their manifest.

A case is kept out although it could serve because it is nearly the same as another, or its prompt is too long.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from medserl_agentloop.data.intake import MedecFormatError, ReadReport, first_line
from medserl_agentloop.data.rows import Exclusions, GameRows, Row, RowPlan, labels_of, seed_note
from medserl_agentloop.data.vignettes import NearDuplicateIndex, Vignette
from medserl_agentloop.games.medical.prompting import ProfileEncoder, load_profile
from medserl_agentloop.paths import MANIFEST, all_or_none, sha256_of

_PACKAGES = ("medserl-agentloop", "pyarrow", "numpy", "jinja2")
_NAMED_IN_A_MESSAGE = 10
_ROW_GROUP = 2000


# Declared, not inferred: inference gives a column that is empty in one file the null type, and files
# whose types differ cannot be concatenated.
MESSAGES = pa.list_(pa.struct({"role": "string", "content": "string"}))
SCHEMA: Any = pa.schema(
    {
        "data_source": "string",
        "agent_name": "string",
        "prompt": MESSAGES,
        "ability": "string",
        "reward_model": pa.struct({"style": "string", "ground_truth": "string"}),
        "extra_info": pa.struct(
            {
                "index": "int64",
                "split": "string",
                "subset": "string",
                "text_id": "string",
                "vignette_id": "string",
                "category": "string",
                "target_label": "string",
                "seed_note": "string",
                "error_note": "string",
                "clean_note": "string",
                "error_type": "string",
                "error_sentence": "string",
                "corrected_sentence": "string",
                "error_sentence_id": "int64",
                "sentences": pa.list_(pa.struct({"id": "int64", "text": "string"})),
                "pair_source": "string",
                "edit_tag": "string",
                "source_sha256": "string",
            }
        ),
    }
)


def write_parquet(rows: list[dict[str, Any]], path: Path, schema: Any = SCHEMA) -> None:
    """Write rows; no rows give a file with the columns alone."""
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path, row_group_size=_ROW_GROUP)


def without_near_duplicates(
    vignettes: Sequence[Vignette], others: Sequence[Vignette], exclusions: Exclusions
) -> list[Vignette]:
    """The cases none of whose notes is a near-duplicate of a note of ``others``."""
    notes = [(other.vignette_id, note) for other in others for note in other.notes]
    index = NearDuplicateIndex(note for _, note in notes)
    kept = []
    for vignette in vignettes:
        matches = [match for note in vignette.notes if (match := index.find(note))]
        if matches:
            number, similarity = max(matches, key=lambda match: match[1])
            detail = f"{notes[number][0]} (4-gram Jaccard {similarity:.2f})"
            exclusions["near-duplicate of a case to stay clear of"].append((vignette.vignette_id, detail))
        else:
            kept.append(vignette)
    return kept


def without_overlong(
    vignettes: Sequence[Vignette], plan: RowPlan, limit: int, tokenizer: str | None, exclusions: Exclusions | None
) -> list[Vignette]:
    """The cases whose first prompts have at most ``limit`` tokens, template included, in every category they serve.

    A ValueError names the others if there are no ``exclusions`` to list them in.
    """
    if tokenizer is None:
        raise ValueError("--max-prompt-tokens needs --tokenizer: the name or folder of the model to train.")
    encoder = ProfileEncoder(load_tokenizer(tokenizer), load_profile(plan.profile))
    overlong = []
    for vignette in vignettes:
        for category in plan.mix:
            if note := seed_note(vignette, category):
                length = len(encoder.of(category.first_role(plan.vanilla_attacker), category, note).ids)
                if length > limit:
                    overlong.append((vignette.vignette_id, f"{category.value}: {length} tokens, limit {limit}"))
    if overlong and exclusions is None:
        named = ", ".join(f"{vignette_id} ({detail})" for vignette_id, detail in overlong[:_NAMED_IN_A_MESSAGE])
        raise ValueError(
            f"{len(overlong)} prompts are overlong: {named}{', ...' if overlong[_NAMED_IN_A_MESSAGE:] else ''}; "
            "raise --max-prompt-tokens, or leave them out with --on-overlong exclude."
        )
    if overlong and exclusions is not None:
        exclusions["overlong prompt"] += overlong
    left_out = {vignette_id for vignette_id, _ in overlong}
    return [vignette for vignette in vignettes if vignette.vignette_id not in left_out]


def near_duplicates(vignettes: Sequence[Vignette], games: GameRows) -> list[dict[str, Any]]:
    """Ids of a training and a validation case, and their similarity.

    Compares one note per case: its correct one, or its error note where that is all there is.
    """

    def used(rows: list[Row]) -> Iterator[tuple[str, str]]:
        ids = {row["extra_info"]["vignette_id"] for row in rows}
        return ((v.vignette_id, v.clean_note or v.error_note or "") for v in vignettes if v.vignette_id in ids)

    val = list(used(games.val))
    index = NearDuplicateIndex(note for _, note in val)
    found = [(name, match) for name, note in used(games.train) if (match := index.find(note))]
    return [{"train": name, "val": val[at][0], "similarity": round(shared, 3)} for name, (at, shared) in found]


def write(
    folder: Path,
    games: GameRows,
    sources: Sequence[ReadReport],
    across_splits: list[dict[str, Any]],
    options: dict[str, Any],
) -> None:
    """Write all three files into ``folder``, or none; the same data set gives the same bytes.

    ``across_splits`` are the near-duplicates. Paths stand in the ``options`` as the user typed them. A ValueError says
    that they cannot be written, or that a prompt lacks its note.
    """
    for row in (*games.train, *games.val):
        # A profile that forgets the note would train on nothing.
        if row["extra_info"]["seed_note"] not in row["prompt"][-1]["content"]:
            raise MedecFormatError(
                f"the prompt of {row['extra_info']['text_id']} does not contain its note; "
                "write {{ note }} in every template of the profile."
            )
    with all_or_none(folder) as place:
        outputs = {}
        for split, rows in (("train", games.train), ("val", games.val)):
            path = place / f"{split}.parquet"
            write_parquet(rows, path)
            outputs[path.name] = {"rows": len(rows), "labels": labels_of(rows), "sha256": sha256_of(path)}
        account = {
            "format": 1,
            "options": options,
            "versions": {"python": platform.python_version(), **{package: version(package) for package in _PACKAGES}},
            "sources": [asdict(source) for source in sources],
            "outputs": outputs,
            "splits": {name: asdict(report) for name, report in games.reports.items()},
            "near_duplicates_across_splits": across_splits,
            "exclusions": [
                {"reason": reason, "count": len(rows), "rows": [{"id": i, "detail": d} for i, d in rows]}
                for reason, rows in games.exclusions.items()
            ],
        }
        text = json.dumps(account, ensure_ascii=False, default=str, indent=1)
        (place / MANIFEST).write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")


def load_tokenizer(path: str) -> Any:
    """A model's tokenizer; a ValueError if it cannot be loaded, or has no chat template."""
    # Imported here: it takes seconds, and conversion needs it for --max-prompt-tokens alone.
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except Exception as error:  # the library's errors have no common base
        raise ValueError(
            f"tokenizer {path}: cannot be loaded ({first_line(error)}); "
            "give --tokenizer the folder or name of the model to train."
        ) from error
    if not tokenizer.chat_template:
        raise ValueError(f"tokenizer {path}: it has no chat template; give --tokenizer that of an instruct model.")
    return tokenizer
