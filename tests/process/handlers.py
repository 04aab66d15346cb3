"""Handlers that behave and misbehave, for tests of workers, which import them by path."""

import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time


class Handler:
    def __init__(self, directory):
        self.directory = directory

    def echo(self, value):
        return value

    def main_module(self):
        return getattr(sys.modules["__main__"], "__file__", "")

    def imported(self, names):
        return [name for name in names if name in sys.modules]

    def where(self):
        return os.getcwd(), sys.executable, sys.path

    def pid(self):
        return os.getpid()

    def variable(self, name):
        return os.environ.get(name)

    def chatter(self):
        print("to stdout")
        print("to stderr", file=sys.stderr)
        return "done"

    def raises(self):
        raise ValueError("first line\nsecond line")

    def exits(self, status):
        os._exit(status)

    def leaves(self):
        sys.exit(3)

    def segfaults(self):
        os.kill(os.getpid(), signal.SIGSEGV)

    def is_killed(self, number=signal.SIGKILL):
        os.kill(os.getpid(), number)

    def is_killed_after_a_child_crashed(self):
        if not (child := os.fork()):
            os.kill(os.getpid(), signal.SIGSEGV)
        os.waitpid(child, 0)
        os.kill(os.getpid(), signal.SIGKILL)

    def crashes_in_a_thread_of_several(self):
        faulthandler.enable()  # as user code may: then all threads are told of
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        os.kill(os.getpid(), signal.SIGSEGV)

    def says_and_crashes(self, text):
        print(text, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)

    def stops(self):
        os.kill(os.getpid(), signal.SIGSTOP)

    def hangs(self):
        while True:
            time.sleep(0.1)

    def out_of_memory(self):
        raise MemoryError

    def grows(self, byte_count):
        self.hoard = bytearray(os.urandom(1)) * byte_count
        time.sleep(30)

    def child(self):
        return subprocess.Popen(["sleep", "300"]).pid
