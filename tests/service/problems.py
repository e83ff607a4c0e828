"""Assertions that hold for every problem document."""

import httpx

from limitforge.service.problems import problem_type


def assert_problem(answer: httpx.Response, status: int, code: str, names: str = "") -> None:
    """`names` is the start of the detail: the name of the field."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert (problem["status"], problem["code"], problem["type"]) == (status, code, problem_type(code))
    assert problem["title"]
    assert problem["detail"].startswith(names), problem["detail"]
    if code == "invalid_field":
        assert problem["field"] == (names or problem["field"])
