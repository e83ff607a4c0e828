"""The one script, assembled from one file per module. These files are the only copy of the engine that runs in Redis.

Redis runs the whole chunk with each call, so what it defines costs time. Each module becomes a function that is called
when `use` first asks for it: a check of a token bucket never builds the rest.
"""

import hashlib
from functools import lru_cache
from importlib.resources import files

_USE = b"""
local loaded = {}
local function use(name)
  local module = loaded[name]
  if module == nil then
    module = modules[name]()
    loaded[name] = module
  end
  return module
end
"""


@lru_cache(maxsize=1)
def script() -> bytes:
    """The whole script: every module as a function, and the door."""
    sources = {
        file.name.removesuffix(".lua"): file.read_bytes()
        for file in files(__name__).iterdir()
        if file.name.endswith(".lua")
    }
    main = sources.pop("main")
    modules = [
        b"modules.%s = function()\n%s\nend" % (name.encode(), source) for name, source in sorted(sources.items())
    ]
    return b"\n".join(
        (b"local modules, use = {}", _USE.replace(b"local function use", b"function use"), *modules, main)
    )


@lru_cache(maxsize=1)
def sha() -> str:
    """Its name for EVALSHA."""
    return hashlib.sha1(script(), usedforsecurity=False).hexdigest()
