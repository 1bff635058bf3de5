"""One error per cause; the message names the key or the file, the needed value and the found one."""


class HeadraceError(Exception):
    """A person can correct the cause; shown as one line, never as a traceback."""


class PermanentError(HeadraceError):
    """A restart of the process would fail in the same way."""


class ConfigError(PermanentError):
    """A configuration key is unknown, of the wrong type, out of bounds, or does not fit the others."""


class DataError(PermanentError):
    """A data set is missing, empty, or not as its manifest says."""


class ModelError(PermanentError):
    """A model folder is missing, unreadable, or of an unsupported kind."""


class CheckpointError(PermanentError):
    """A checkpoint is missing, unreadable, or belongs to another run."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is not as it was written; an older one may be intact."""


class RunDirectoryBusyError(PermanentError):
    """Another process holds the run directory."""


class TrainingDivergedError(PermanentError):
    """Too many steps in a row had a loss or gradient that is not finite."""


class ProtocolError(HeadraceError):
    """A message is not of the types or values that both peers agreed on."""


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


class TransitionError(HeadraceError):
    """An edge of the slot states does not start at the slot's state."""
