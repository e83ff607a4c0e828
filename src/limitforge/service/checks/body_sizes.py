"""How large the bodies of requests may be."""

SMALL_BODY_BYTES = 4_096  # up to this size, parsing takes less time than HTTP itself, so no budget applies
MAX_BODY_BYTES = 65_536  # of every request but a batch, and of each check of a batch
MAX_BATCH_BODY_BYTES = 1_048_576
