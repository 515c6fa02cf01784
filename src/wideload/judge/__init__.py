"""Turns your own CUDA kernel into a judgement of it: right at the hard sizes or with which bug, how far from the wall, what to do next."""

from __future__ import annotations

from wideload.judge.diagnosis import BUGS, Finding, diagnose
from wideload.judge.judge import NOT_CHECKED, Judgement, judge
from wideload.judge.problems import PROBLEMS, Problem, write_problem
from wideload.judge.request import Request, read_request

__all__ = [
    "BUGS",
    "NOT_CHECKED",
    "PROBLEMS",
    "Finding",
    "Judgement",
    "Problem",
    "Request",
    "diagnose",
    "judge",
    "read_request",
    "write_problem",
]
