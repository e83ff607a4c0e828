-- The algorithms by their codes, which also stand in every state; the two buckets come first. Each is loaded when a call first needs it.
--
-- Some have a `step`: read, open, wait, take, seal and write at once, without a table in between, which saves Redis over a quarter of its time. It takes from a
-- bucket that a release of this format wrote under the same numbers (a window's limit may differ), that is live, has nothing pending and has room. It answers
-- with the next string, its `until` and what is left; with nil for any other bucket, also for one that is a state by now (a table, whose length is not that of
-- any string): then the long way decides. `start` is the same for a bucket that is not there.

local NAMES = { 'token_bucket', 'leaky_bucket', 'fixed_window', 'sliding_window', 'sliding_window_counter', 'concurrency', 'quota' }

return {
  COUNT = #NAMES,
  LEAKY_BUCKET = 2,
  CONCURRENCY = 6,
  QUOTA = 7,

  of = function(code)
    return use(NAMES[code])
  end,
}
