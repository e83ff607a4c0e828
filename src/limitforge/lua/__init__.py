"""The Lua script, assembled from one file per module. These files are the only copy of the engine that runs in Redis.

Redis runs the whole chunk with each call, so each definition in it costs time. Therefore all modules are in one
function, which builds a module when `use` first asks for it: a check of a token bucket builds no other algorithm.

On a Cluster, a second form of the script takes a multi-slot call: independent checks
whose keys lie in several slots of one server. It receives its keys among
the arguments, after the strings, together with the number of keys in each slot.
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

_ONE_SLOT = b"local SLOTS -- none\n"
_MULTI_SLOT = b"""#!lua flags=allow-cross-slot-keys
local SLOTS, KEYS = cmsgpack.unpack(ARGV[#ARGV]), {}
local count = 0
for i = 1, #SLOTS do count = count + SLOTS[i] end
for i = 1, count do KEYS[i] = ARGV[#ARGV - 1 - count + i] end
"""


@lru_cache(maxsize=1)
def script() -> bytes:
    """Return the script for keys of one slot."""
    return _ONE_SLOT + _body()


@lru_cache(maxsize=1)
def _body() -> bytes:
    """Return `use`, every module under its name, and the entry point."""
    lua = (file for file in files(__name__).iterdir() if file.name.endswith(".lua"))
    sources = {file.name.removesuffix(".lua"): file.read_bytes() for file in lua}
    entry_point = sources.pop("dispatch")
    modules = [b"if name == '%s' then\n%s\nend" % (name.encode(), source) for name, source in sorted(sources.items())]
    return b"\n".join((_USE, b"function load(name)", *modules, b"end", entry_point))


@lru_cache(maxsize=1)
def sha() -> str:
    """Return the SHA-1 of the script, for EVALSHA."""
    return hashlib.sha1(script(), usedforsecurity=False).hexdigest()


@lru_cache(maxsize=1)
def multi_slot_script() -> bytes:
    """Return the script for keys of several slots."""
    return _MULTI_SLOT + _body()


@lru_cache(maxsize=1)
def multi_slot_sha() -> str:
    """Return the SHA-1 of the multi-slot script, for EVALSHA."""
    return hashlib.sha1(multi_slot_script(), usedforsecurity=False).hexdigest()
