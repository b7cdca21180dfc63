"""Every exception that the library raises, in one tree, and how text from elsewhere is shown in their messages.

DeepSpeedError
├── DeepSpeedConfigError (ValueError)        the JSON config, or a value in it
│   ├── BatchSizeError (AssertionError)      train = micro × accumulation × data-parallel ranks
│   ├── ElasticityError                      batch sizes for many world sizes
│   │   ├── ElasticityConfigError            the section, or what was planned before, does not allow it
│   │   └── ElasticityIncompatibleWorldSize  this number of ranks is not one of the plan's
│   └── FeatureUnavailable                   a known key whose feature is not part of this version
├── AcceleratorError (RuntimeError)          no such device, or none of the wanted kind
├── CheckpointError (RuntimeError)           files of a checkpoint: absent, damaged, not written
├── CommError (RuntimeError)                 a collective, or process groups
│   └── RendezvousError                      environment variables that do not describe one job
├── FileError (OSError)                      a file could not be read or written as asked; `errno` says why
├── LayoutError (ValueError, AssertionError) sizes and ranks that do not tile the world
├── OpUnavailable (RuntimeError)             an operation that this machine cannot run
├── PipelineError (RuntimeError)             a pipeline that cannot do what was asked, or of which a stage failed
├── UsageError (ValueError, AssertionError)  arguments of a public function that contradict each other
│   └── LostEditError (RuntimeError)         a sharded parameter was written where that has no effect
└── VerificationError (RuntimeError)         verify mode found a value that is not what it must be

Each also inherits the builtin that scripts catch today. A message says what was found, what was expected and
what to do.
"""

from __future__ import annotations

__all__ = [
    "AcceleratorError",
    "BatchSizeError",
    "CheckpointError",
    "CommError",
    "DeepSpeedConfigError",
    "DeepSpeedError",
    "ElasticityConfigError",
    "ElasticityError",
    "ElasticityIncompatibleWorldSize",
    "FeatureUnavailable",
    "FileError",
    "LayoutError",
    "LostEditError",
    "OpUnavailable",
    "PipelineError",
    "RendezvousError",
    "UsageError",
    "VerificationError",
]

_SHOWN = "\n\t"


def printable(text: object, limit: int = 10_000) -> str:
    """Text from elsewhere with every character that is not visible spelled out, such as `\\x1b`; cut after `limit`.

    Escape sequences, carriage returns, characters that turn the direction of writing and halves of surrogate pairs
    come from names in files. Line ends and tabs stay.
    """
    found = str(text)
    cut = "" if len(found) <= limit else f"... ({len(found)} characters)"
    found = found[:limit]
    if found.isascii() and found.isprintable():
        return found + cut
    return "".join(c if c.isprintable() or c in _SHOWN else _spelled(c) for c in found) + cut


def _spelled(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


class DeepSpeedError(Exception):
    """Base of every error of this library."""


class DeepSpeedConfigError(DeepSpeedError, ValueError):
    """The config is wrong; `path` is the dotted path of the offending key, empty for the whole config."""

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class BatchSizeError(DeepSpeedConfigError, AssertionError):
    """The three batch keys and the number of data-parallel ranks do not fit together."""


class ElasticityError(DeepSpeedConfigError):
    """Base of the errors about elastic batch sizes."""


class ElasticityConfigError(ElasticityError):
    """The `elasticity` section is absent, wrong, or not what the job was planned with."""


class ElasticityIncompatibleWorldSize(ElasticityError):
    """The elastic batch does not run on this number of ranks."""


class FeatureUnavailable(DeepSpeedConfigError):
    """A valid key asks for a feature that this version does not have."""


class AcceleratorError(DeepSpeedError, RuntimeError):
    """The wanted accelerator is unknown or not usable on this machine."""


class CheckpointError(DeepSpeedError, RuntimeError):
    """Files of a checkpoint are absent, damaged or foreign, or could not be written.

    Its message quotes names out of files, so no character of it reaches a terminal that the terminal would obey.
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(printable(message))


class CommError(DeepSpeedError, RuntimeError):
    """A collective was misused, or process groups are not in the needed state."""


class RendezvousError(CommError):
    """The environment variables that describe the job are missing, partial or contradict each other."""


class FileError(DeepSpeedError, OSError):
    """Bytes of a file could not be read or written: made of `errno`, a message and the path, as any OSError."""


class LayoutError(DeepSpeedError, ValueError, AssertionError):
    """Parallel sizes or rank lists that do not tile the world."""


class OpUnavailable(DeepSpeedError, RuntimeError):
    """No implementation of an operation can run here."""


class PipelineError(DeepSpeedError, RuntimeError):
    """A pipeline cannot do what was asked of it, or one of its stages failed; the message names stage and rank."""


class UsageError(DeepSpeedError, ValueError, AssertionError):
    """A public function was called with arguments that are missing or contradict each other."""


class LostEditError(UsageError, RuntimeError):
    """A sharded parameter was written in a way that would be lost."""


class VerificationError(DeepSpeedError, RuntimeError):
    """Verify mode found a value that is not what it must be; the message names rank, tensor and both values."""
