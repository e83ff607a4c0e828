"""Every code block of the documentation works."""

from pathlib import Path

import pytest

from limitforge import StoreOptions
from tests.docs.code_blocks import ROOT, TEST_DEADLINE_MS, BlockFailed, run_file

DOCUMENTS = [
    path for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))) if path.exists()
]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_code_block_works(
    document: Path, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine, Redis may reply later than the default deadline: then checks would be decided without it.
    defaults = StoreOptions.__init__.__kwdefaults__
    assert defaults
    monkeypatch.setitem(defaults, "deadline_ms", TEST_DEADLINE_MS)
    try:
        run_file(document, redis_url, tmp_path)
    except BlockFailed as error:
        pytest.fail(str(error), pytrace=False)


WORKING = """
```python
import asyncio
from dataclasses import dataclass

url = "redis://localhost:6379/0"
await asyncio.sleep(0)
```

- Indented, and in the same namespace and event loop:

  ```python
  @dataclass
  class Seen:
      url: "str"

  assert Seen(url).url == EXPECTED
  ```

```sh
make help
pip install limitforge
git clone https://example.com/limitforge.git && cd limitforge
test -f Makefile
cat > made-by-a-block <<END
redis://localhost:6379/0
END
sleep 1000 &
```

```console
$ grep --quiet 127.0.0.1 \\
>   made-by-a-block
grep says nothing, and this line is output
```

````text
```
a block in a block
```
````
"""

BROKEN = {
    "python": ("```python\nx = 1\n\nx / 0\n```", "line 4, in <module>"),
    "python_syntax": ("```python\nx = = 1\n```", "line 2"),
    "await": ("```python\nimport asyncio\nawait asyncio.wait_for(asyncio.sleep(9), 0)\n```", "TimeoutError"),
    "shell": ("```sh\ntrue\nfalse\ntrue\n```", "failed at line 3: false"),
    "pipe": ("```sh\nfalse | true\n```", "exit status 1"),
    "console": ("```console\n$ false\noutput\n```", "failed at line 2: false"),
    "make": ("```sh\nmake no-such-target\n```", "No rule to make target"),
    "json": ("```json\n{\n```", "Expecting property name"),
    "toml": ("```toml\na =\n```", "Invalid value"),
    "unknown": ("```ruby\n```", "a block is one of python, sh"),
    "no_info": ("```\n```", "this one says nothing"),
    "open": ("```text\n", "never closed"),
}


def test_blocks_are_run_as_a_reader_would_run_them(redis_url: str, tmp_path: Path) -> None:
    document = tmp_path / "working.md"
    document.write_text(WORKING.replace("EXPECTED", repr(redis_url)))
    run_file(document, redis_url, tmp_path)


@pytest.mark.parametrize(("text", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_block_fails_with_its_place(text: str, message: str, tmp_path: Path) -> None:
    document = tmp_path / "broken.md"
    document.write_text(text)
    with pytest.raises(BlockFailed) as failure:
        run_file(document, "redis://unused", tmp_path)
    assert str(failure.value).startswith(f"{document}:2: ")
    assert message in str(failure.value)
