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
    """A message is not what both sides agreed on."""


class SharedMemoryError(HeadraceError):
    """Shared memory is not of the size or kind that the run needs."""


class SlotError(HeadraceError):
    """A slot cannot be used; its batch has to be produced again."""


class SlotHeaderError(SlotError):
    """The bytes of a slot are not a header."""


class SlotSizeError(SlotError):
    """A batch does not fit into a slot."""


class SlotChecksumError(SlotError):
    """The content of a slot is not the content that its header was written for."""


class StaleLeaseError(SlotError):
    """A slot holds another batch than the lease was granted for."""


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
