"""The CPU build on a machine: it sets the variables that make OpenMP and OpenBLAS fast, unless the user set them.

Bits depend neither on these variables nor on the number of threads. A run that cannot get its threads or its memory ends
with one line of error."""
import glob
import os
import pathlib
import resource
import subprocess
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import cli  # noqa: E402
import run  # noqa: E402

FOLDER = pathlib.Path(cli.PROGRAM).parent.name
SET = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OPENBLAS_CORETYPE", "OPENBLAS_NUM_THREADS")

# Preloaded before OpenBLAS: acts as an OpenBLAS with kernels for processors before AVX2, until others are requested.
OLD_OPENBLAS = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
char* openblas_get_corename(void) {
    char* (*real)(void) = (char* (*)(void))dlsym(RTLD_NEXT, "openblas_get_corename");
    return getenv("OPENBLAS_CORETYPE") ? real() : "Prescott";
}
"""


def processor_has(*features):
    cpuinfo = pathlib.Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    flags = next((line for line in cpuinfo if line.startswith("flags")), "").split()
    return all(feature in flags for feature in features)


@unittest.skipUnless(FOLDER.startswith("cpu"), "the CPU build's")
class Processors(cli.Case):
    def start(self, limits=(), threads=2, variables={}, **options):
        """Runs the program; of the variables in SET only `variables` are set."""
        environment = {key: value for key, value in cli.environment(threads).items() if key not in SET}
        if threads is None:
            del environment["OMP_NUM_THREADS"]

        def set_limits():
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            for which, value in limits:
                resource.setrlimit(which, (value, value))
        return subprocess.run(cli.command(train=self.train_glob, **options), cwd=self.dir, timeout=60,
                              stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", preexec_fn=set_limits,
                              env={**environment, **variables})

    def device(self, **options):
        done = self.start(steps=1, **options)
        self.assertEqual(done.returncode, 0, done.stderr)
        return next(line for line in done.stdout.splitlines() if line.startswith("device "))

    def process(self, *before, **variables):
        """(environment, name, arguments, given arguments) of a process that trains."""
        command = [*before, *map(str, cli.command(train=self.train_glob, steps=1000000))]
        environment = {key: value for key, value in cli.environment(2).items() if key not in SET}
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, encoding="utf-8",
                              env={**environment, **variables}) as program:
            try:
                for line in program.stdout:
                    if line.startswith("step "):
                        break
                proc = pathlib.Path(f"/proc/{program.pid}")
                entries = (proc / "environ").read_bytes().decode().split("\0")
                found = {key: value for key, _, value in (entry.partition("=") for entry in entries) if key in SET}
                arguments = (proc / "cmdline").read_bytes().decode().split("\0")[:-1]
                return found, (proc / "comm").read_text("utf-8").strip(), arguments, command
            finally:
                program.kill()

    def test_what_is_set(self):
        """The variables are set in the process itself, which keeps its name, so that pkill finds it."""
        found, name, arguments, command = self.process()
        self.assertEqual((found.get("GOMP_SPINCOUNT"), found.get("OPENBLAS_NUM_THREADS")), ("2000", "1"))
        self.assertEqual((name, arguments), (os.path.basename(cli.PROGRAM), command))

    def test_what_the_user_set_stands(self):
        own = dict(GOMP_SPINCOUNT="7", OPENBLAS_CORETYPE="Prescott", OPENBLAS_NUM_THREADS="2")
        self.assertEqual(self.process(**own)[0], own)
        own = dict(OMP_WAIT_POLICY="active", OPENBLAS_CORETYPE="Prescott", OPENBLAS_NUM_THREADS="1")
        self.assertEqual(self.process(**own)[0], own)

    @unittest.skipUnless(processor_has("avx2", "fma"), "needs a processor with AVX2")
    def test_poor_kernels_are_not_taken(self):
        if "OpenBLAS" not in self.device():
            self.skipTest("another CBLAS")
        source, library = self.dir / "old.c", self.dir / "old.so"
        source.write_text(OLD_OPENBLAS, "utf-8")
        subprocess.run([os.environ.get("CC", "gcc"), "-shared", "-fPIC", source, "-o", library, "-ldl"], check=True)
        best = "SkylakeX" if processor_has(*("avx512" + part for part in ("f", "cd", "bw", "dq", "vl"))) else "Haswell"
        self.assertIn(f"({best} kernels)", self.device(variables={"LD_PRELOAD": str(library)}))
        own = {"LD_PRELOAD": str(library), "OPENBLAS_CORETYPE": "Nehalem"}
        self.assertIn("(Nehalem kernels)", self.device(variables=own))

    def test_all_processors(self):
        """Threads bound to processors do not restrict the program to the processors of the first thread."""
        count = len(os.sched_getaffinity(0))
        for variables in {}, {"OMP_PROC_BIND": "true"}, {"OMP_PLACES": "cores"}:
            self.assertRegex(self.device(threads=None, variables=variables), rf"CPU, {count} threads?, ")

    @unittest.skipUnless(run.mpirun(1) and len(os.sched_getaffinity(0)) > 1, "needs mpirun and two processors")
    def test_ranks_that_are_bound(self):
        """A rank that mpirun has bound to few of its processors says so, and how it gets them all."""
        count = len(os.sched_getaffinity(0))
        for bind, threads, bound in (("hwthread", None, True), ("hwthread", 2, True), ("hwthread", 1, False), ("none", None, False)):
            command = run.mpirun(1)
            at = command.index("OMP_NUM_THREADS=1")
            command[at - 1:at + 1] = ["-x", f"OMP_NUM_THREADS={threads}"] if threads else []
            command[command.index("none")] = bind
            environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
            done = subprocess.run([*command, *map(str, cli.command(train=self.train_glob, steps=1))], cwd=self.dir, timeout=60,
                                  stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", env=environment)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(f"mpirun has bound this rank to 1 of {count} processors, which 1 rank could share: start it with "
                             "mpirun --bind-to none" in done.stderr, bound, (bind, threads, done.stderr))

    @unittest.skipUnless(glob.glob("/lib64/ld-linux-*"), "needs glibc's loader")
    def test_started_by_the_loader(self):
        """A program started by the dynamic loader, perhaps with the loader's options, does not restart itself."""
        self.assertEqual(self.process(glob.glob("/lib64/ld-linux-*")[0])[0], {})

    def failure(self, done, code):
        """The message, which must be all that the run wrote to stderr."""
        self.assertEqual(done.returncode, code, done.stderr)
        self.assertRegex(done.stderr, r"\Atrain_moe: error: .*\n\Z")
        return done.stderr

    def test_threads_that_cannot_be_had(self):
        for threads in (99999, 999999999999):  # the second exceeds an int
            message = self.failure(self.start(threads=threads, steps=1), 2)
            self.assertIn(f"OMP_NUM_THREADS asks for {threads} threads; it can be 1 to 512", message)
        # 64 stacks of 64 MiB are 4 GiB of address space.
        limits = [(resource.RLIMIT_STACK, 64 << 20), (resource.RLIMIT_AS, 2 << 30)]
        if "sanitize" not in FOLDER:
            done = self.start(threads=64, limits=limits, steps=1, variables={"OPENBLAS_NUM_THREADS": "1"})  # or it fails first
            self.assertRegex(self.failure(done, 1), r"out of memory.* \d+ of 64")

    def test_stacks_that_are_too_small(self):
        """Small stacks, of the process or of OpenMP's threads, end a run with one line of error. Those allowed suffice."""
        for kib in (64, 128, 511):
            message = self.failure(self.start(limits=[(resource.RLIMIT_STACK, kib << 10)], steps=1), 1)
            self.assertIn(f"a stack is limited to {kib} KiB, and 512 are needed: raise the limit (ulimit -s 8192)", message)
        for size in ("64k", "100", " 511 K", "65536B"):
            message = self.failure(self.start(steps=1, variables={"OMP_STACKSIZE": size}), 2)
            self.assertIn(f"OMP_STACKSIZE or GOMP_STACKSIZE is {size}; at least 512k are needed", message)
        mxfp8 = dict(precision="mxfp8", dim=128, kv_lora=32, expert_ffn=128, steps=2)  # it has the largest frames
        if "sanitize" not in FOLDER:
            done = self.start(limits=[(resource.RLIMIT_STACK, 512 << 10)], out="limit", **mxfp8)
            self.assertEqual((done.returncode, done.stderr), (0, ""))
        for size in ("512", "1M", "1 g"):
            done = self.start(variables={"OMP_STACKSIZE": size}, out=size, **mxfp8)
            self.assertEqual((done.returncode, done.stderr), (0, ""))

    @unittest.skipIf("sanitize" in FOLDER, "the sanitizer takes terabytes of address space")
    def test_memory_that_cannot_be_had(self):
        """Too little memory ends a run with one line of error, from the least with which the libraries start to enough."""
        ended = []
        for kib in (100000, 150000, 200000, 250000, 300000, 310000, 325000, 400000, 600000, 1000000, 3000000):
            done = self.start(limits=[(resource.RLIMIT_AS, kib << 10)], steps=2, out=f"{kib}")
            ended.append(done.returncode)
            if done.returncode:
                self.assertIn("memory", self.failure(done, 1))
        self.assertEqual(ended, sorted(ended, reverse=True))
        self.assertEqual((ended[0], ended[-1]), (1, 0))


if __name__ == "__main__":
    cli.main()
