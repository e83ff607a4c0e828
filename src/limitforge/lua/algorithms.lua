-- The algorithms by their codes, which are also stored in every state. Codes 1 and 2 are the buckets with a level. Each
-- algorithm is loaded when a call first needs it.
--
-- Some have a `step`, which reads, opens, waits, takes, seals and writes in one go, without a table in between. That
-- saves Redis over a quarter of its time. It applies to a live bucket in the format of this release, under the same
-- numbers (the limit of a window may differ), with room and without pending entries. It returns the next string, its
-- `until`, and what remains; or nil for any other bucket, which then takes the general path. If the value is a state
-- already, which is a table, the check of its length returns nil as well. `start` does the same for a bucket that does
-- not exist.

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
