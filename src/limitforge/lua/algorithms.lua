-- The algorithms by their codes, which are also the first byte but one of every state.

local LEAKY_BUCKET, CONCURRENCY, QUOTA_CODE = 2, 6, 7

algorithms[1] = token_bucket
algorithms[2] = leaky_bucket
algorithms[3] = fixed_window
algorithms[4] = sliding_window
algorithms[5] = sliding_window_counter
algorithms[6] = concurrency
algorithms[7] = quota
