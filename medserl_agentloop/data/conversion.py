"""``medserl data convert`` without its printing: what is kept out of the files, their columns, their manifest."""

from __future__ import annotations

import json
import platform
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from medserl_agentloop.data.cases import MedecFormatError, ReadReport, Vignette, first_line, near_duplicates
from medserl_agentloop.data.reader import ReadResult, read_files
from medserl_agentloop.data.rows import (
    AS_GIVEN,
    NOT_FOR_TRAINING,
    ConvertOptions,
    Exclusions,
    Row,
    SplitRows,
    build_rows,
    labels_of,
    mix_of,
    seed_note,
)
from medserl_agentloop.games.medical.prompting import ProfileEncoder, load_profile
from medserl_agentloop.paths import MANIFEST, all_or_none, sha256_of

_PACKAGES = ("medserl-agentloop", "pyarrow", "numpy", "jinja2")
_NAMED_IN_A_MESSAGE = 10
_ROW_GROUP = 2000


def _texts(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "string")


# Declared, not inferred: inference gives a column that is empty in one file the null type, and files
# whose types differ cannot be concatenated.
MESSAGES = pa.list_(pa.struct(_texts("role", "content")))
_FACTS = {
    "index": "int64",
    **_texts("split", "subset", "text_id", "vignette_id", "category", "target_label", "seed_note"),
    **_texts("error_note", "clean_note", "error_type", "error_sentence", "corrected_sentence"),
    "error_sentence_id": "int64",
    "sentences": pa.list_(pa.struct({"id": "int64", "text": "string"})),
    **_texts("pair_source", "edit_tag", "source_sha256"),
}
SCHEMA: Any = pa.schema(
    {
        **_texts("data_source", "agent_name"),
        "prompt": MESSAGES,
        "ability": "string",
        "reward_model": pa.struct(_texts("style", "ground_truth")),
        "extra_info": pa.struct(_FACTS),
    }
)


def write_parquet(rows: list[dict[str, Any]], path: Path, schema: Any = SCHEMA) -> None:
    """Write rows; no rows give a file with the columns alone."""
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path, row_group_size=_ROW_GROUP)


def read_inputs(options: ConvertOptions) -> tuple[ReadResult, set[str] | None]:
    """All inputs, and the ids of the cases that were given for validation."""
    join, repair = options.join or (), options.repair_encoding
    if options.val_input and options.val_fraction is not None:
        raise ValueError("--val-fraction and --val-input contradict each other; give one of them.")
    read = read_files([*options.input, *(options.val_input or ())], join=join, repair_encoding=repair)
    if not options.val_input:
        return read, None
    first = sum(r.pairs + r.clean_only + r.error_only for r in read.reports[: len(options.input)])
    return read, {case.vignette_id for case in read.vignettes[first:]}


def make_rows(
    read: ReadResult, options: ConvertOptions, val_ids: set[str] | None
) -> tuple[SplitRows, list[dict[str, Any]]]:
    """The rows of both splits, and the cases of one that are nearly the same as one of the other."""
    exclusions: Exclusions = defaultdict(list)
    cases = read.vignettes
    if options.exclude_near_duplicates_of:
        others = read_files(
            options.exclude_near_duplicates_of, join=options.join or (), repair_encoding=options.repair_encoding
        )
        cases = _without_near_duplicates(cases, others.vignettes, exclusions)
    if options.max_prompt_tokens is not None:
        cases = _without_overlong(cases, options, options.max_prompt_tokens, exclusions)
    try:
        made = build_rows(cases, options, exclusions, val_ids)
    except ValueError as error:
        given = not options.keeps_all and mix_of(read.vignettes)
        hint = f" Or give --mix {AS_GIVEN}: every row in its own category." if given else ""
        if not (overlap := exclusions[NOT_FOR_TRAINING]):
            raise ValueError(f"{error}{hint}") from error
        first = len(read.vignettes) - len(val_ids or ())
        raise ValueError(
            f"{len(overlap)} of the {first} cases of {', '.join(options.input)} share a note with a case of "
            f"{', '.join(options.val_input or ())} and cannot be trained on as well ({overlap[0][0]} is "
            f"{overlap[0][1]}): leave out --val-input, or give it a file of other cases."
            + (f" {error}" if len(overlap) < first else "")
        ) from error
    return made, _near_duplicates(cases, made)


def _without_near_duplicates(
    cases: Sequence[Vignette], others: Sequence[Vignette], exclusions: Exclusions
) -> list[Vignette]:
    """The cases none of whose notes is a near-duplicate of a note of ``others``."""
    notes, of_others = ([(case.vignette_id, note) for case in each for note in case.notes] for each in (cases, others))
    likest: dict[str, tuple[float, str]] = {}
    for case_id, other, similarity in near_duplicates(notes, of_others):
        if similarity > likest.get(case_id, (0.0, ""))[0]:
            likest[case_id] = similarity, f"{other} (4-gram Jaccard {similarity:.2f})"
    exclusions["near-duplicate of a case to stay clear of"] += [(case_id, why) for case_id, (_, why) in likest.items()]
    return [case for case in cases if case.vignette_id not in likest]


def _without_overlong(
    cases: Sequence[Vignette], options: ConvertOptions, limit: int, exclusions: Exclusions
) -> list[Vignette]:
    """The cases whose first prompts have at most ``limit`` tokens, template included, in every category they serve."""
    if options.tokenizer is None:
        raise ValueError("--max-prompt-tokens needs --tokenizer: the name or folder of the model to train.")
    encoder = ProfileEncoder(load_tokenizer(options.tokenizer), load_profile(options.profile))
    overlong: list[tuple[str, str | None]] = []
    mix = options.shares(cases)
    for case in cases:
        for category in mix:
            if note := seed_note(case, category):
                length = len(encoder.of(category.first_role(options.vanilla_attacker), category, note).ids)
                if length > limit:
                    overlong.append((case.vignette_id, f"{category.value}: {length} tokens, limit {limit}"))
    if overlong and options.on_overlong == "error":
        named = ", ".join(f"{case_id} ({detail})" for case_id, detail in overlong[:_NAMED_IN_A_MESSAGE])
        raise ValueError(
            f"{len(overlong)} prompts are overlong: {named}{', ...' if overlong[_NAMED_IN_A_MESSAGE:] else ''}; "
            "raise --max-prompt-tokens, or leave them out with --on-overlong exclude."
        )
    if overlong:
        exclusions["overlong prompt"] += overlong
    left_out = {case_id for case_id, _ in overlong}
    return [case for case in cases if case.vignette_id not in left_out]


def _near_duplicates(cases: Sequence[Vignette], made: SplitRows) -> list[dict[str, Any]]:
    """Ids of a training and a validation case, and their similarity.

    Compares one note per case: its correct one, or its error note where that is all there is.
    """

    def used(rows: list[Row]) -> list[tuple[str, str]]:
        ids = {row["extra_info"]["vignette_id"] for row in rows}
        return [(c.vignette_id, c.clean_note or c.error_note or "") for c in cases if c.vignette_id in ids]

    alike = near_duplicates(used(made.train), used(made.val))
    return [{"train": train, "val": val, "similarity": round(similarity, 3)} for train, val, similarity in alike]


def write(
    options: ConvertOptions, made: SplitRows, sources: Sequence[ReadReport], across_splits: list[dict[str, Any]]
) -> None:
    """Write all three files into the output folder, or none; the same data set gives the same bytes.

    ``across_splits`` are the near-duplicates. A ValueError says that they cannot be written, or that a prompt lacks its
    note.
    """
    for row in (*made.train, *made.val):
        # A profile that forgets the note would train on nothing.
        if row["extra_info"]["seed_note"] not in row["prompt"][-1]["content"]:
            raise MedecFormatError(
                f"the prompt of {row['extra_info']['text_id']} does not contain its note; "
                "write {{ note }} in every template of the profile."
            )
    with all_or_none(options.output) as place:
        outputs = {}
        for split, rows in (("train", made.train), ("val", made.val)):
            path = place / f"{split}.parquet"
            write_parquet(rows, path)
            outputs[path.name] = {"rows": len(rows), "labels": labels_of(rows), "sha256": sha256_of(path)}
        account = {
            "format": 1,
            "options": {f"--{name.replace('_', '-')}": value for name, value in options.model_dump().items()},
            "versions": {"python": platform.python_version(), **{package: version(package) for package in _PACKAGES}},
            "sources": [asdict(source) for source in sources],
            "outputs": outputs,
            "splits": made.reports,
            "near_duplicates_across_splits": across_splits,
            "exclusions": [
                {"reason": reason, "count": len(rows), "rows": [{"id": i, "detail": d} for i, d in rows]}
                for reason, rows in made.exclusions.items()
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
