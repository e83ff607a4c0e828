-- The algorithms by their codes, which are also stored in every state. Codes 1 and 2 are the buckets with a level. Each
-- algorithm is loaded when a call first needs it.
--
-- Some have a `step`, which takes a cost without building a table for the state. That saves Redis over a quarter of its
-- time. It returns the next string, its `until_us`, and what remains. It returns nil, and the check takes the general
-- path, unless all of these hold:
--   the value is a string: a state is a table, whose length is never WIDTH
--   the bucket is live, in the format of this release, and without pending entries
--   it has the same parameters (the limit of a window may differ)
--   the cost fits
-- `start` does the same for a bucket that does not exist.

local NAMES = {
  'token_bucket', 'leaky_bucket', 'fixed_window', 'sliding_window', 'sliding_window_counter', 'concurrency', 'quota',
}

return {
  COUNT = #NAMES,
  LEAKY_BUCKET = 2,
  CONCURRENCY = 6,
  QUOTA = 7,

  of = function(code)
    return use(NAMES[code])
  end,
}
