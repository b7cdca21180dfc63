"""Environment variables: those that go to other hosts, those that a report shows, and what looks like a secret.

A name decides what is secret: that of an option, a variable, a key of JSON or of a URL's query. Masking too much costs
a look at the script; masking too little costs a key.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from deepspeed.launcher.errors import LaunchError
from deepspeed.trust import read_regular

MASK = "********"

# Anywhere in a name, or only as its end: `max_tokens`, `key_dim` and `author` are no secrets.
_ANYWHERE = r"secret|passw(?:or)?d|passphrase|credential|api[-_.]?key|authorization"
_AT_THE_END = r"key|token|auth|pass|pwd|creds?|cookie|bearer|sig|signature|sas|pat|jwt"
_SECRET_NAME = re.compile(rf"{_ANYWHERE}|(?:{_AT_THE_END})[-_]?\d*$", re.IGNORECASE)

_KEY = r"(?<![\w.\-])\w[\w.\-]*"  # from its beginning: long words would otherwise be tried from every letter
_VALUE = r"""(?:"[^"]*"|'[^']*'|[^\s"'&;,|]+)"""
# A name with what leads from it to its value, and the value. They are looked for one after the other: the value of a
# name that is no secret may hold a pair itself.
_PAIRS = [
    (re.compile(lead), re.compile(value, re.IGNORECASE))
    for lead, value in (
        (rf"{_KEY}=", _VALUE),
        (rf"""["']{_KEY}["']\s*:\s*""", r""""[^"]*"|'[^']*'|[^\s,}\]]+"""),
        (r"(?<!\S)--?\w[\w.\-]*\s+", rf"(?!--){_VALUE}"),
        (rf"{_KEY}:\s*", rf"(?:(?:bearer|basic|token)\s+)?{_VALUE}"),
    )
]
_BEARER = re.compile(r"(\bbearer\s+)\S+", re.IGNORECASE)
_KNOWN = re.compile(r"\b(?:hf_|sk-|gh[oprsu]_|github_pat_|glpat-|AKIA|xox[abprs]-|AIza)[\w-]{8,}")
_USER_AND_PASSWORD = re.compile(r"(://[^/@:]*:).*", re.DOTALL)
_ONLY_USER = re.compile(r"(https?://)[^/@\s:]+@", re.IGNORECASE)
_ANY_OPTION = re.compile(r"--[A-Za-z]")


def is_secret(name: str) -> bool:
    """True if what has this name should not be seen: `--wandb_api_key`, `HF_TOKEN`, `auth`."""
    return _SECRET_NAME.search(name) is not None


def mask_command(words: Sequence[str]) -> list[str]:
    """A command for people: of every word what may be seen, and nothing of a word that follows a secret's option."""
    shown: list[str] = []
    awaited = False
    for word in words:
        if awaited and not _ANY_OPTION.match(word):
            shown.append(MASK)
            awaited = False
            continue
        shown.append(mask_secrets(word))
        awaited = word.startswith("-") and "=" not in word and is_secret(word)
    return shown


def mask_secrets(text: str) -> str:
    """The text without passwords of URLs, values of secret names, and keys of well-known shapes."""
    name, sign, value = text.partition("=")
    if sign and value and re.fullmatch(r"[-+~]*\w[\w.\-]*", name) and is_secret(name):
        return f"{name}={MASK}"  # the whole word, whatever the value is made of
    text = _ONLY_USER.sub(rf"\1{MASK}@", re.sub(r"\S+", _without_password, text))
    for lead, pattern in _PAIRS:
        text = _masked(text, lead, pattern)
    return _KNOWN.sub(MASK, _BEARER.sub(rf"\1{MASK}", text))


def _without_password(word: re.Match[str]) -> str:
    """A URL's password ends at the last @ of the word: people do not escape the ones in it."""
    before, at, after = word[0].rpartition("@")
    return _USER_AND_PASSWORD.sub(rf"\1{MASK}", before) + at + after


def _masked(text: str, lead: re.Pattern[str], pattern: re.Pattern[str]) -> str:
    parts, done, at = [], 0, 0
    while found := lead.search(text, at):
        at = found.end()
        if is_secret(found[0].strip(" \t\n\"'=:")) and (value := pattern.match(text, at)):
            parts += [text[done:at], MASK]
            done = at = value.end()
    return "".join([*parts, text[done:]])


# ---- variables for other hosts

# File in the home or working folder whose K=V lines go to other hosts; clients append to it.
ENVIRONMENT_FILE = os.environ.get("DS_ENV_FILE", ".deepspeed_env")

EXPORT_ENVS = ["MLFLOW", "PYTHON", "MV2", "UCX", "GLOO_", "DS_", "DEEPSPEED_"]
"""Beginnings of the names of variables that go to other hosts; scripts that call `runner.main` append theirs."""
ENVIRONMENT_FOLDERS = [os.path.expanduser("~"), "."]
"""Where the file is looked for, as scripts may change it too; a later folder's file wins."""
_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_MOST_BYTES = 2**24


def exported(
    environ: Mapping[str, str],
    prefixes: Sequence[str],
    folders: Iterable[Path],
    name: str = ENVIRONMENT_FILE,
) -> dict[str, str]:
    """Name → value for the ranks of other hosts; `prefixes` are the accelerator's, a later folder's file wins."""
    wanted = (*EXPORT_ENVS, *prefixes)
    found = {key: value for key, value in environ.items() if key.startswith(wanted) and _VARIABLE.fullmatch(key)}
    if "AISC_JOB_NAME" in environ:  # its hosts choose their own network devices
        for own in ("NCCL_IB_HCA", "UCX_NET_DEVICES"):
            found.pop(own, None)
    here = os.getcwd()
    paths = environ.get("PYTHONPATH")
    found["PYTHONPATH"] = here if not paths else f"{here}{os.pathsep}{paths}"
    for folder in folders:
        path = folder / name
        if path.is_file():
            try:
                text = read_regular(path, _MOST_BYTES).decode("utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise LaunchError(f"{path} cannot be read: {error}") from error
            found.update(parse_environment_file(text, str(path)))
    return found


def parse_environment_file(text: str, name: str = ENVIRONMENT_FILE) -> dict[str, str]:
    """One KEY=VALUE per line, the value as written but for spaces around it; blank lines and # lines are skipped."""
    found: dict[str, str] = {}
    for number, line in enumerate(text.split("\n"), 1):
        words = line.strip()
        if not words or words.startswith("#"):
            continue
        key, sign, value = words.partition("=")
        key = key.strip()
        if not sign or not _VARIABLE.fullmatch(key):
            raise LaunchError(f"{name}, line {number}: {mask_secrets(words)!r:.200} is not a variable; write KEY=VALUE")
        if "\0" in value:
            raise LaunchError(f"{name}, line {number}: the value of {key} has a NUL character, which no variable can")
        found[key] = value.strip()
    return found


def looks_secret(name: str, value: str) -> bool:
    """True if a variable's name or value says that others must not see it."""
    return is_secret(name) or mask_secrets(value) != value


# ---- variables in reports

_SHOWN = (
    *("DS_", "DEEPSPEED_", "NCCL_", "RCCL_", "GLOO_", "UCX_", "MV2_", "PDSH_", "OMPI_COMM_WORLD_", "PMI_", "PMIX_"),
    *("CUDA_", "HIP_", "ROCR_", "TORCH_", "TORCHELASTIC_", "TORCHINDUCTOR_", "PYTORCH_", "TRITON_"),
    *("OMP_", "KMP_", "MKL_"),
)
_SHOWN_NAMES = {
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "CROSS_RANK", "CROSS_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "ROLE_RANK"),
    *("ZE_AFFINITY_MASK", "ASCEND_RT_VISIBLE_DEVICES", "MLU_VISIBLE_DEVICES", "SDAA_VISIBLE_DEVICES"),
    *("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NNODES", "SLURM_JOB_NODELIST"),
    *("AZUREML_EXPERIMENT_ID", "AZ_BATCH_MASTER_NODE", "AZ_BATCHAI_MPI_MASTER_NODE"),
    *("CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS", "CPATH", "LIBRARY_PATH", "LD_LIBRARY_PATH", "LD_PRELOAD"),
    *("PYTHONPATH", "CONDA_PREFIX", "VIRTUAL_ENV"),
}
_OURS = {"PYTORCH_NVML_BASED_CUDA_CHECK"}  # set by importing this package


def _shown(name: str, value: str) -> str:
    """The value as one printable line, without anything that looks like a key, a token or a password."""
    if value and is_secret(name):
        return MASK
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in mask_secrets(value))


def relevant(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Name → value of the variables that are set and matter, sorted."""
    wanted = {name for name in environ if name in _SHOWN_NAMES or name.startswith(_SHOWN)}
    return {name: _shown(name, environ[name]) for name in sorted(wanted - _OURS)}
