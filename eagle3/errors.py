"""What a user of eagle3 can run into, one class per place where it happens.

Every message names the file or key, the value found, and the command or key that mends it.
What only a bug can break is an `assert`, not one of these.
"""


class Eagle3Error(Exception):
    """Anything that a user can cause and mend."""


class ParamsError(Eagle3Error):
    """A value in params.yaml, or several, that cannot be used."""


class TargetError(Eagle3Error):
    """The target model cannot be fetched, read or trusted."""


class CorpusError(Eagle3Error):
    """A source of conversations is malformed, empty or yields nothing to supervise."""


class ArtifactError(Eagle3Error):
    """A result of an earlier stage is missing, half-written or made from something else."""


class StoreError(ArtifactError):
    """A Zarr store is damaged, unfinished or belongs to another target or corpus."""


class StorageError(Eagle3Error):
    """Object storage that cannot be reached, or does not let us in."""


class VocabError(Eagle3Error):
    """A draft vocabulary cannot be built, or its maps do not agree."""


class CheckpointError(ArtifactError):
    """A drafter or a training state that cannot be read or does not fit."""


class TrainingError(Eagle3Error):
    """Training cannot go on with these params."""


class EngineError(Eagle3Error):
    """A serving engine did not start, answer or do what it was asked."""


class DiskFullError(Eagle3Error):
    """Too little room where results go; what was finished is kept and found again."""
