"""What a run reads: its models, and the rows that it plays.

:func:`check_models` asks whether a model's layers read a restart of position ids as a new sequence, from its
configuration alone. Attention does: Transformers masks it at every restart. Layers that carry state along the sequence
(linear attention, Mamba, convolutions) do not, and a role would be trained on a state that holds the other's turns. The
certificate measures the same on the loaded model.

:func:`check_rows` looks at a few rows before Ray starts; the trainer looks at all of them (core/dataset.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset
from huggingface_hub import HfApi, constants, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled, RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id
from omegaconf import DictConfig, OmegaConf
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

from medserl_agentloop.core.config import ConfigError, SelfPlayConfig, game_class
from medserl_agentloop.core.dataset import check_dataset
from medserl_agentloop.core.encoding import ChatEncoder
from medserl_agentloop.core.run_check.run import Run
from medserl_agentloop.core.step_file import CONFIG_FILE
from medserl_agentloop.paths import sha256_of

DAMAGED = (OSError, pa.ArrowException, MemoryError, UnicodeDecodeError)
"""What pyarrow raises for a file that it cannot read."""

HUB_SECONDS = 3.0
"""How long the hub may take to say whether it has a model."""

ROWS_AT_START = 500
"""Rows of a data file that are looked at before Ray starts: about a second."""

LATEST = "latest_checkpointed_iteration.txt"
"""Where verl writes the step of the last checkpoint."""

SAME_RUN = ("selfplay.game", "selfplay.profile", "actor_rollout_ref.model.path")
"""Keys that a run keeps when it is resumed."""

TRAIN_HASHES = "medserl_train_files_sha256"
"""Where ``run_config.yaml`` has the hashes of the training files."""

_ISOLATED_LAYERS = {"full_attention", "sliding_attention", "attention", "dense", "sparse", "moe", "mlp"}
"""Layer types of Transformers' configurations that attend within a packed sequence, or mix no tokens at all."""


def missing_models(run: Run) -> Iterator[str]:
    """One sentence for each model that is neither here nor on the hub. verl says so after a minute or more."""
    told: set[str] = set()
    for engine in run.trained.values():
        path = str(run[f"{engine}.path"])
        if path not in told and "://" not in path and (why := _not_found(path)):
            told.add(path)
            yield f"{engine}.path={path}: {why}"


def _not_found(path: str) -> str | None:
    """Why no model can be loaded from a path or a name on the hub; None if one can."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        if (folder / "config.json").is_file():
            return None
        return (
            "the folder has no config.json. Name a folder in Hugging Face's format; docs/evaluation.md says how to "
            "make one from a checkpoint of a run."
        )
    try:
        validate_repo_id(path)
    except HFValidationError:
        return f"there is no such folder (seen from {Path.cwd()}), and no model on the hub can have this name."
    if isinstance(try_to_load_from_cache(path, "config.json"), str):
        return None
    here = f"it is no folder here (seen from {Path.cwd()}) and not in the cache {constants.HF_HUB_CACHE}"
    try:
        HfApi().model_info(path, timeout=HUB_SECONDS)
    except RepositoryNotFoundError:
        return f"{here}, and {constants.ENDPOINT} has no model of this name, or none for you: run `hf auth login`."
    except (OfflineModeIsEnabled, httpx.HTTPError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return (
            f"{here}, and {constants.ENDPOINT} cannot be asked ({reason}). Fetch it where there is a network, with "
            f"`hf download {path} --local-dir FOLDER`, and set the key to that folder."
        )
    return None


def data_files(run: Run) -> Iterator[str]:
    """One sentence for each data file that is missing or damaged, or holds less than a batch."""
    for key in ("data.train_files", "data.val_files"):
        files = [Path(name).expanduser() for name in run.names(key) if "://" not in name]
        missing = [str(file) for file in files if not file.exists()]
        if missing:
            yield (
                f"{key}: {', '.join(missing)} does not exist (seen from {Path.cwd()}). Write it with "
                "data_prep/medec_to_parquet.py, or name another."
            )
        elif all(file.suffix == ".parquet" for file in files):
            rows, batch = 0, run["data.train_batch_size"]
            for file in files:
                try:
                    rows += pq.read_metadata(file).num_rows
                except DAMAGED as error:
                    yield damaged(f"{key}={file}", error)
                    rows += batch
            if files and not rows:
                yield f"{key} has no rows, and verl cannot load that. Name another file; data.train_files will do."
            elif key == "data.train_files" and files and rows < batch:
                yield f"{key} has {rows} rows, fewer than data.train_batch_size={batch}. Set that to {rows} or less."


def damaged(file: str, error: Exception) -> str:
    """What to say of a parquet file that cannot be read."""
    return (
        f"{file} cannot be read ({type(error).__name__}: {error}): it is damaged, or no parquet file. Write it again "
        "with data_prep/medec_to_parquet.py."
    )


def config_text(config: DictConfig) -> str:
    """The whole config of a run as YAML, with the hashes of its training files: what a resumed run is held against."""
    run = Run(config, SelfPlayConfig.from_run(config))
    files = [Path(name) for name in run.names("data.train_files")]
    hashes = {TRAIN_HASHES: sorted(sha256_of(file) for file in files if file.is_file())}
    own = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    own.selfplay = run.selfplay.model_dump(mode="json")  # with the defaults of today
    return f"{OmegaConf.to_yaml(own, resolve=True)}{OmegaConf.to_yaml(OmegaConf.create(hashes))}"


def another_run(run: Run) -> Iterator[str]:
    """A sentence if the run would resume from checkpoints of a run of another game, model, profile or data."""
    if (old := _resumed(run)) is None:
        return
    new = OmegaConf.create(config_text(run.config))
    found = {key: (OmegaConf.select(old, key), OmegaConf.select(new, key)) for key in SAME_RUN}
    differs = [
        f"{key} was {was} and is {now}"
        for key, (was, now) in found.items()
        if was and Path(str(was)).name != Path(str(now)).name  # a folder of models may have been moved
    ]
    if old.get(TRAIN_HASHES) and old[TRAIN_HASHES] != new[TRAIN_HASHES]:
        differs.append(
            f"data.train_files was {old.data.train_files} and is {new.data.train_files}, or its rows changed"
        )
    if differs:
        yield (
            f"trainer.default_local_dir={run['trainer.default_local_dir']} has checkpoints of another run "
            f"({'; '.join(differs)}), and this one would resume from them. Set trainer.default_local_dir to a folder "
            "of its own; or, to go on from them on purpose, trainer.resume_mode=resume_path and "
            "trainer.resume_from_path to a folder global_step_N."
        )


def lost_checkpoint(run: Run) -> Iterator[str]:
    """A sentence if verl's file with the step of the last checkpoint names none.

    A full disk, or a kill at the wrong moment, leaves it empty (trainer_base.py, _save_checkpoint): verl fails on that
    once the models are loaded. Where it names a folder that is gone, verl starts from nothing without a word.
    """
    folder = Path(run["trainer.default_local_dir"])
    file = folder / LATEST
    if run["trainer.resume_mode"] != "auto" or not file.is_file():
        return
    step = file.read_text(encoding="utf-8", errors="replace").strip()
    if not (step.isdecimal() and (folder / f"global_step_{step}").is_dir()):
        # data.pt is the last that verl writes.
        whole = [path.parent.name.removeprefix("global_step_") for path in folder.glob("global_step_*/data.pt")]
        newest = max((name for name in whole if name.isdecimal()), key=int, default=None)
        resume = (
            f"Write {newest} into it to resume from the newest checkpoint there; or" if newest else "There is none:"
        )
        yield f"{file} says {step!r}, which is no checkpoint. {resume} move {folder} away to start from nothing."


def changed_credit(run: Run) -> Iterator[str]:
    """A sentence if the run would resume with another estimator."""
    old, key = _resumed(run), "algorithm.adv_estimator"
    was = None if old is None else OmegaConf.select(old, key)
    if was and was != run[key]:
        yield f"{key} was {was} in this run's first part and is {run[key]}: its metrics are those of two runs"


def _resumed(run: Run) -> Any:
    """The config with which the run was last started that this one resumes; None where it resumes none."""
    folder, before = Path(run["trainer.default_local_dir"]), Path(run.selfplay.records) / CONFIG_FILE
    resumes = run["trainer.resume_mode"] == "auto" and (folder / LATEST).exists()
    return OmegaConf.load(before) if resumes and before.is_file() else None


def parquet_files(run: Run, key: str) -> list[Path]:
    """The files of a data key that are here and are parquet by their name."""
    files = (Path(name).expanduser() for name in run.names(key))
    return [file for file in files if file.suffix == ".parquet" and file.is_file()]


def tokenizer_of(model: DictConfig, **options: Any) -> Any:
    """The tokenizer that a run's ``model`` node asks for; raises as ``AutoTokenizer.from_pretrained``."""
    trusted = bool(model.get("trust_remote_code", False))
    path = model.get("tokenizer_path") or model.path
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trusted, **options)
    tokenizer.chat_template = model.get("custom_chat_template") or tokenizer.chat_template
    return tokenizer


def check_rows(run: Run) -> None:
    """Check the longest rows of the data files, as the trainer checks all of them once Ray is up.

    What only verl can read is left to the trainer: remote files, other formats, a data set class of the user's, a
    tokenizer that is not here yet.

    Raises:
        ConfigError: Names the row, what is wrong with it and what to do.
    """
    model, data = run.config.actor_rollout_ref.model, run.config.data
    if data.custom_cls.path is not None:
        return
    try:
        tokenizer = tokenizer_of(model, local_files_only=True)
    except (OSError, ValueError):
        return
    encoder = ChatEncoder.of_run(tokenizer, data)
    game = game_class(run.selfplay.game)(run.selfplay, encoder)
    for key in ("data.train_files", "data.val_files"):
        for file in parquet_files(run, key):
            try:
                table = pq.read_table(file)
                table.validate(full=True)  # or a damaged text is found where it is used, without the file's name
                rows = SimpleNamespace(dataframe=Dataset(table))
            except DAMAGED as error:
                raise ConfigError(damaged(f"{key}={file}", error)) from None
            if missing := {"prompt", "extra_info"} - set(table.column_names):
                raise ConfigError(
                    f"{key}={file} has no column {', '.join(sorted(missing))}. Write it with "
                    "data_prep/medec_to_parquet.py."
                )
            check_dataset(rows, f"{key}={file}", game, encoder, data, ROWS_AT_START)


def check_models(run: Run) -> None:
    """Refuse a run in isolated contexts whose model would let them leak.

    A configuration that cannot be read here, e.g. on a remote file system, is left to the certificate.

    Raises:
        ConfigError: Names the model and the layers, and says what to use instead.
    """
    models = run.trained.values() if run.selfplay.context == "isolated" else ()
    for path, trust in {(run[f"{model}.path"], bool(run[f"{model}.trust_remote_code"])) for model in models}:
        try:
            config = AutoConfig.from_pretrained(path, trust_remote_code=trust)
        except (OSError, ValueError):
            continue  # verl says what is wrong with it
        if problem := leak_of(config):
            raise ConfigError(
                f"selfplay.context=isolated cannot run with model.path={path} ({config.model_type}): {problem}, so the "
                "roles would be trained on contexts that hold each other's turns. Use a model with full or "
                "sliding-window attention and one position per token (Qwen3, Llama, Mistral, Gemma 3), or set "
                "selfplay.context=shared."
            )


def leak_of(config: Any) -> str | None:
    """Why contexts in one row would leak in a model of this configuration of Transformers; None if not."""
    text = config.get_text_config()
    layers = [*(getattr(text, "layer_types", None) or ()), *(getattr(text, "layers_block_type", None) or ())]
    if carrying := sorted(set(layers) - _ISOLATED_LAYERS):
        return f"its layers of type {', '.join(carrying)} do not start anew where position ids restart"
    models: list[Any] = []
    for auto, known in product((AutoModel, AutoModelForCausalLM), (config, text)):
        if type(known) in auto._model_mapping:
            found = auto._model_mapping[type(known)]
            models += found if isinstance(found, tuple) else [found]
    if any(getattr(model, "_is_stateful", False) for model in models):
        return "its layers carry a state along the sequence that does not start anew where position ids restart"
    rope = repr(getattr(text, "rope_parameters", None))
    if "mrope_section" in rope or any(hasattr(model, "get_rope_index") for model in models):
        return "its rotary positions have several dimensions (MRoPE), and restarts are written for one"
    return None
