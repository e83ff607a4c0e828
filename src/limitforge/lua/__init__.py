"""The one script, assembled from one file per module. These files are the only copy of the engine that runs in Redis.

Redis runs the whole chunk with each call, so what it defines costs time. All modules together are one function, which
builds a module when `use` first asks for it: a check of a token bucket never builds the rest.
"""

import hashlib
from functools import lru_cache
from importlib.resources import files

_USE = b"""
local loaded, load, use = {}
function use(name)
  local module = loaded[name]
  if module == nil then
    module = load(name)
    loaded[name] = module
  end
  return module
end
"""


@lru_cache(maxsize=1)
def script() -> bytes:
    """The whole script: `use`, every module behind its name, and the door."""
    lua = (file for file in files(__name__).iterdir() if file.name.endswith(".lua"))
    sources = {file.name.removesuffix(".lua"): file.read_bytes() for file in lua}
    main = sources.pop("main")
    modules = [b"if name == '%s' then\n%s\nend" % (name.encode(), source) for name, source in sorted(sources.items())]
    return b"\n".join((_USE, b"function load(name)", *modules, b"end", main))


@lru_cache(maxsize=1)
def sha() -> str:
    """Its name for EVALSHA."""
    return hashlib.sha1(script(), usedforsecurity=False).hexdigest()
