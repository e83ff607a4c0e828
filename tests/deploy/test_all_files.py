"""Check what all deployment files have in common."""

import re
from dataclasses import fields

from limitforge.service.settings import ENV_PREFIX, Settings
from tests.deploy.deployment import BIN, DEPLOY, ROOT, deployment_files, run


def test_every_named_setting_exists() -> None:
    known = {f"{ENV_PREFIX}{field.name.upper()}" for field in fields(Settings)}
    named = {
        (path.relative_to(ROOT).as_posix(), name)
        for path in deployment_files()
        for name in re.findall(r"\bLIMITFORGE_[A-Z_]*[A-Z]", path.read_text())
    }
    assert len(named) > 20
    assert {(path, name) for path, name in named if name not in known} == set()


def test_the_yaml_is_well_formed() -> None:
    rules = (
        "{extends: default, rules: {line-length: {max: 120}, document-start: disable, "
        "braces: {min-spaces-inside: 1, max-spaces-inside: 1, min-spaces-inside-empty: 0, max-spaces-inside-empty: 0}, "
        "comments: {min-spaces-from-content: 1}}}"
    )
    run(BIN / "yamllint", "--strict", "-d", rules, DEPLOY)


def test_no_secret_is_kept_in_git() -> None:
    for secret in ("deploy/compose/.env", "deploy/compose/certs/tls.key"):
        run("git", "check-ignore", "--no-index", secret)
    for path in deployment_files():
        for name, value in re.findall(r"(?m)^\s*\w*(PASSWORD|PEPPERS)[=:][ \t]*(\S*)", path.read_text()):
            if name == "PEPPERS":  # a working example would be a pepper that everyone knows
                assert value in ("", '""') or value.startswith("${"), (path, value)
            else:
                assert "change-me" in value or value.startswith("${"), (path, value)
