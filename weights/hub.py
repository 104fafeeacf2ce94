"""From what a user calls a model to a folder on this machine: the bundled demo, a folder, or a Hub id."""

from __future__ import annotations

import re
from pathlib import Path

DEMO = Path(__file__).resolve().parent / "demo"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WANTED = ["*.safetensors", "*.json", "*.txt", "*.jinja", "tokenizer.model", "spiece.model"]
_UNWANTED = ["*/*", "consolidated*"]  # the same weights in their makers' own format


def resolve(model: str | Path | None = None) -> Path:
    """The folder of a model: None and "demo" are the bundled one, a folder is itself, "org/name" comes from the Hub.

    A folder wins over a Hub id of the same name, and what the local cache holds whole is used without the network.
    Raises ValueError, in one line, for what is none of these and for a Hub model that cannot be had.
    """
    if model is None or str(model) == "demo":
        if not (DEMO / "config.json").exists():
            raise ValueError(f"the bundled demo model is missing from {DEMO}; reinstall funcllm or name a model")
        return DEMO
    if not str(model):
        raise ValueError("the model's name is empty; give a model folder, org/name, or demo")
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        raise ValueError(f"{model} is a file; name the folder that holds config.json and *.safetensors")
    if isinstance(model, str) and _HUB_ID.fullmatch(model):
        return _from_hub(model)
    raise ValueError(f"{model} is neither a folder nor a Hub id; give a model folder, org/name, or demo")


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        cached = Path(snapshot_download(name, local_files_only=True, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
        if _is_whole(cached):
            return cached
    except LocalEntryNotFoundError:
        pass
    except HFValidationError as error:
        raise ValueError(f"{name} is no Hub id: {_one_line(error)}") from None
    try:
        return Path(snapshot_download(name, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
    except Exception as error:
        raise ValueError(_why_not(name, error)) from None


def _is_whole(folder: Path) -> bool:
    """Whether a cached snapshot has its config and every weight file that it names."""
    from funcllm.weights.load import open_checkpoint

    try:
        open_checkpoint(folder)
    except (ValueError, OSError):
        return False
    return (folder / "config.json").exists()


def _why_not(name: str, error: Exception) -> str:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return f"{name} is gated on the Hub; accept its terms there and run `hf auth login`, or give a local folder"
    if isinstance(error, RepositoryNotFoundError):
        return f"{name} is neither a folder here nor a model on the Hub; check the name (private ones need a login)"
    return (
        f"{name} is not in the local cache and cannot be downloaded ({_one_line(error)}); go online, or give a folder"
    )


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else f"{text[:200]}..."
