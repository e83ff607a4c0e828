"""The one script, assembled from one file per module. These files are the only copy of the engine that runs in Redis.

Redis runs the whole chunk with each call, so what it defines costs time. All modules together are one function, which
builds a module when `use` first asks for it: a check of a token bucket never builds the rest.

On a Cluster there is a second form of it, for one call over several slots of one server: it names its keys among the
arguments, behind the strings, and says how many of them lie in each slot.
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

_ALONE = b"local SLOTS -- none\n"
_ACROSS = b"""#!lua flags=allow-cross-slot-keys
local SLOTS, KEYS = cmsgpack.unpack(ARGV[#ARGV]), {}
local count = 0
for i = 1, #SLOTS do count = count + SLOTS[i] end
for i = 1, count do KEYS[i] = ARGV[#ARGV - 1 - count + i] end
"""


@lru_cache(maxsize=1)
def script() -> bytes:
    """The whole script, for keys of one slot."""
    return _ALONE + _body()


@lru_cache(maxsize=1)
def _body() -> bytes:
    """`use`, every module behind its name, and the door."""
    lua = (file for file in files(__name__).iterdir() if file.name.endswith(".lua"))
    sources = {file.name.removesuffix(".lua"): file.read_bytes() for file in lua}
    main = sources.pop("main")
    modules = [b"if name == '%s' then\n%s\nend" % (name.encode(), source) for name, source in sorted(sources.items())]
    return b"\n".join((_USE, b"function load(name)", *modules, b"end", main))


@lru_cache(maxsize=1)
def sha() -> str:
    """Its name for EVALSHA."""
    return hashlib.sha1(script(), usedforsecurity=False).hexdigest()


@lru_cache(maxsize=1)
def script_across() -> bytes:
    """The same for keys of several slots."""
    return _ACROSS + _body()


@lru_cache(maxsize=1)
def sha_across() -> str:
    return hashlib.sha1(script_across(), usedforsecurity=False).hexdigest()
