"""What a hostile plan file is tried on, in a process of its own; imported by path there."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from functools import cache

import msgspec
import torch
from plans import make_plan
from torch import nn

import steadytorch.serve.plan as plan_room
from steadytorch import transforms
from steadytorch.device.facts import load_facts
from steadytorch.errors import PlanError
from steadytorch.plan.store import Found, Store
from steadytorch.serve.plan import Plan, load_plan
from steadytorch.tune import optimize as optimizing
from steadytorch.tune import session
from steadytorch.tune.optimize import optimize

_RUNNING_CODE = ("exec", "compile", "import", "os.system", "subprocess.Popen", "pickle.find_class")


class _Listener:
    """Records code that runs; an audit hook cannot be removed from the interpreter."""

    def __init__(self):
        self.heard, self.listening = [], False
        sys.addaudithook(self._hear)

    def _hear(self, event, arguments):
        if self.listening and event in _RUNNING_CODE:
            self.heard.append((event, str(arguments)[:200]))

    def __enter__(self):
        self.heard, self.listening = [], True
        return self.heard

    def __exit__(self, *raised):
        self.listening = False


class Victim:
    """A small model, its plan in a store and in a file, and the audit hook."""

    def __init__(self, directory):
        torch.set_num_threads(1)  # there are several of these
        # Reading the machine's facts takes a fifth of the time, and no file changes them.
        found = cache(load_facts)
        session.load_facts = plan_room.load_facts = optimizing.load_facts = found
        torch.manual_seed(0)
        self.model, self.x = nn.Sequential(nn.Linear(3, 4), nn.ReLU()).eval(), torch.ones(2, 3)
        self.expected = self.model(self.x).detach()
        plan = make_plan(self.model, self.x)
        self.key, self.store = plan.key, Store(directory / "plans", second="")
        self.stored, self.file = self.store.put(plan.key, plan), directory / "plan.json"
        self.whole = self.stored.read_bytes()
        self.listener = _Listener()
        # What is imported, and resolved of our own annotations, at the first time is not its doing.
        for content in (self.whole, b"", self.whole):
            self.stored.write_bytes(content)
            served = self._optimized()
            served(self.x)
            assert served.report().hits == (content != b"")  # it looks where the files are put
        assert list(self.store.entries())
        for each in (plan, msgspec.structs.replace(plan, trains="0" * 64)):
            each.apply(self.model)(self.x)
        for kind in transforms.REGISTRY:
            with suppress(msgspec.ValidationError):
                msgspec.convert({}, kind.Parameters)
        logging.disable(logging.WARNING)

    def untouched(self):
        """The valid file that the mutants are made from."""
        return self.whole

    def hears(self, text):
        """The events while a piece of code is run."""
        with self.listener as heard:
            eval(text)
        return [event for event, _ in heard]

    def tries(self, files):
        """Of each file, whether it is taken for a plan; raises where one does any harm."""
        return [self._tried(content) for content in files]

    def _tried(self, content):
        try:
            return self._is_taken(content)
        except BaseException as error:
            raise AssertionError(f"{type(error).__name__} by {content!r}") from error

    def _is_taken(self, content):
        """Tries the four entry points: each gives a plan or a reason, and the model's outputs."""
        for path in (self.stored, self.file):
            path.write_bytes(content)
        with self.listener as heard:
            found = self.store.get(self.key, Plan)
        assert heard == [], heard
        plan = self._loaded()
        if isinstance(found, Found):
            assert msgspec.structs.replace(found.payload, path=str(self.file)) == plan
        else:
            assert found.reason.isprintable()
            assert not self.stored.exists()
            self.stored.write_bytes(content)  # for benchmark mode to find by itself
        self._serve(isinstance(found, Found))
        if plan is not None:
            with self.listener as heard:
                out = plan.apply(self.model)(self.x)
            assert [each for each in heard if each[0] != "import"] == [], heard
            assert self._is_close(out.detach())
        return plan is not None

    def _loaded(self):
        plan, refused = None, ""
        with self.listener as heard:
            try:
                plan = load_plan(self.file)
            except PlanError as error:
                refused = str(error)
        assert heard == [], heard
        assert refused.isprintable()
        return plan

    def _serve(self, is_found):
        with self.listener as heard:
            served = self._optimized()
            out = served(self.x).detach()
        if is_found:  # and may ask for transforms that import what they need
            heard = [event for event, _ in heard if event != "import"]
            assert self._is_close(out)
        else:
            assert torch.equal(out, self.expected)
            assert served.report().hits == 0
            assert not self.stored.exists()
        assert heard == [], heard

    def _is_close(self, out):
        return out.shape == self.expected.shape and torch.allclose(out, self.expected)

    def _optimized(self):
        """Runs `optimize` over the store, without the canary, which would find wrong plans."""
        return optimize(self.model, store=self.store.root, canary=False)
