"""What can go wrong, one class per cause; the message says what, where, needed and found."""


class HeadraceError(Exception):
    """Something a person can mend; shown as one line, never as a traceback."""


class ConfigError(HeadraceError):
    """A configuration key is unknown, of the wrong type, or does not fit the others."""


class DataError(HeadraceError):
    """A data set is missing, empty, or not what its manifest says."""


class ModelError(HeadraceError):
    """A model folder is missing, unreadable, or of an unsupported kind."""


class ProtocolError(HeadraceError):
    """A message or a slot header is not what both sides agreed on."""


class CheckpointError(HeadraceError):
    """A checkpoint is missing, unreadable, or belongs to another run."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is not as it was written; an older one may be."""


class RunDirectoryBusyError(HeadraceError):
    """Another process holds the run directory."""


class TransitionError(HeadraceError):
    """A slot was asked to take an edge that its state does not have."""


class TrainingDivergedError(HeadraceError):
    """Too many steps in a row had a loss or gradient that is not finite."""
