-- The algorithms by their codes, which also stand in every state; the two buckets come first. Each is loaded when a call first needs it.

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
