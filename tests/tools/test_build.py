"""Libraries that `make` finds, objects that it compiles again, counts of tests/run.py, kernels in bench/profile.cc:
python3 tests/tools/test_build.py

`make` runs in a copy made of links. Its compiler only writes the file that -o names."""
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
NVCC = """#!/bin/sh
while [ $# -gt 0 ]; do [ "$1" != -o ] || out=$2; shift; done
: >"$out"
"""


@unittest.skipUnless(shutil.which("make"), "there is no make")
class Build(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="test_build_")
        self.addCleanup(folder.cleanup)
        self.dir = pathlib.Path(folder.name)
        for path in ROOT.iterdir():
            if path.name not in (".git", "build"):
                (self.dir / path.name).symlink_to(path)
        (self.dir / "bin").mkdir()
        (self.dir / "bin/nvcc").write_text(NVCC, "utf-8")
        (self.dir / "bin/nvcc").chmod(0o755)

    def test_first_screen(self):
        """The lines about libraries come before those of the compiler, also with several jobs."""
        (self.dir / "scripts").unlink()
        (self.dir / "scripts").mkdir()
        for name in ("setup.sh", "first_run.sh"):
            (self.dir / "scripts" / name).write_text("", "utf-8")
        (self.dir / "scripts/probe.sh").write_text("echo probe; sleep 0.5; echo end of probe\n", "utf-8")
        for target in (["all", "-j8"], ["train"]):
            shutil.rmtree(self.dir / "build", ignore_errors=True)
            done = self.start(["make", "MPI=0", "CBLAS_LIB=", "HAVE_GPU=", f"CC={self.dir}/bin/nvcc", "ARCHS=80", "JOBS=8", *target])
            self.assertEqual((done.returncode, done.stdout.splitlines()[:2]), (0, ["probe", "end of probe"]), done.stderr)
            self.assertIn("  LINK  build/cpu/train_moe", done.stdout.splitlines()[2:])

    def test_visible_gpus(self):
        """`make` counts the GPUs that CUDA_VISIBLE_DEVICES leaves, of two or of none."""
        for said, visible, count in (("echo 0; echo 1", None, 2), ("echo 0; echo 1", "", 0), ("echo 0; echo 1", "-1", 0), ("echo 0; echo 1", "1", 1),
                                     ("echo 0; echo 1", "0,1", 2), ("echo No devices were found; exit 6", None, 0)):
            self.program("nvidia-smi", said + "\n")
            environment = {name: value for name, value in self.environment().items() if name != "CUDA_VISIBLE_DEVICES"}
            environment |= {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
            done = self.start(["make", "--eval", "show: ; @echo $(GPUS)", "show", "MPI=0", "ARCHS=80"], environment)
            self.assertEqual(done.stdout, f"{count}\n", f"{said}: {visible}")

    def start(self, command, environment=None):
        return subprocess.run(command, cwd=self.dir, env=environment or self.environment(), timeout=60, capture_output=True, encoding="utf-8")

    def program(self, name, text):
        (self.dir / "bin" / name).write_text("#!/bin/sh\n" + text, "utf-8")
        (self.dir / "bin" / name).chmod(0o755)

    def test_programs_that_hang(self):
        """Only goals that need the GPUs ask nvidia-smi. One that hangs is left after its limit, with a line."""
        self.program("nvidia-smi", "trap '' TERM\necho asked >>asked\nsleep 1000\n")
        self.program("timeout", "shift 3\nexec %s -k 0.5 0.5 \"$@\"\n" % shutil.which("timeout"))
        run = lambda *goals: self.start(["make", "MPI=0", *goals])
        for goals in (["help"], ["cpu", "-n"], ["clean"], ["test-build", "-n"], ["cuda", "-n", "ARCHS=80"]):
            done = run(*goals)
            self.assertEqual((done.returncode, done.stderr), (0, ""), goals)
            self.assertFalse((self.dir / "asked").exists(), goals)
        done = run("cuda", "-n")
        self.assertEqual((done.returncode, done.stderr), (0, "make: nvidia-smi does not answer: this machine's GPUs are not known\n"))
        self.assertIn("code=compute_100", done.stdout)  # code for all GPUs
        self.assertEqual((self.dir / "asked").read_text("utf-8"), "asked\n")
        for name in ("mpicc", "mpirun", "git", "python"):
            self.program(name, "sleep 1000\n")
        (self.dir / ".git").mkdir()
        done = self.start(["make", "cpu", "-n", "PYTHON=python"])
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertIn("parallel/ranks_one.c", done.stdout)
        done = self.start(["sh", ROOT / "scripts/probe.sh"])
        self.assertRegex(done.stdout, r"(?m)^GPU +none$")

    def test_what_drivers_answer(self):
        """The code is for this machine's GPUs, each once. What is no number is not taken for one: then for all GPUs."""
        for said, arches in (("9.0\n9.0\n12.0", ["90a", "120"]), ("[N/A]", None), ("[Not Supported]", None),
                             ('Field "compute_cap" is not a valid field to query.', None)):
            self.program("nvidia-smi", f"case $1 in *index*) echo 0 ;; *) echo '{said}' ;; esac\n")
            done = self.start(["make", "--eval", "show: ; @echo '$(GPU_CODE)'", "show", "MPI=0"])
            self.assertEqual(done.stderr, "")
            self.assertEqual(sorted(re.findall(r"code=sm_(\w+)", done.stdout)), sorted(arches or ["80", "86", "89", "90a", "100", "120"]), said)

    def test_flags_of_the_command_line(self):
        """Flags given to make join those without which an object does not compile, or has other bits."""
        for cuda, given in ((False, "CFLAGS=-O1"), (False, "CPPFLAGS=-DX"), (True, "NVCCFLAGS=-O1")):
            folder = "build/cuda" if cuda else "build/cpu"
            objects = [f"{folder}/{name}.o" for name in ("parallel/ranks_mpi", "layers/draw", "device/version")]
            done = self.start(["make", "-n", "MPI=1", "ARCHS=80", "MPI_FLAGS=-Impi", "MPI_LIBS=", given, *objects])
            self.assertEqual(done.returncode, 0, done.stderr)
            lines = [next(line for line in done.stdout.splitlines() if f"-o {name}" in line) for name in objects]
            for line, own in zip(lines, ("-Impi", "--fmad=false" if cuda else "-ffp-contract=off", "-DCOMMIT=")):
                for flag in (own, "-I.", "-fopenmp", "-std=", given.partition("=")[2]):
                    self.assertIn(flag, line)
        for given in ("SANITIZE=1 CFLAGS=-O1".split(), ["SANITIZE=1"]):
            done = self.start(["make", "-n", "MPI=0", *given, "build/cpu-sanitize/train_moe"])
            self.assertTrue(all("-fsanitize=address" in line for line in done.stdout.splitlines() if " -o " in line))

    def test_setup_waits_for_another_apt(self):
        """While another apt has the lock of the lists, setup.sh tries again; apt waits for the other locks itself."""
        self.program("id", "echo 0\n")
        self.program("sleep", "echo slept $1 >>said\n")
        apt = """echo "$*" >>said
case $* in *update*) [ -e second ] || { touch second; echo E: $WHY >&2; exit 100; }; esac
"""
        for why, code, slept in (("Could not get lock /var/lib/apt/lists/lock. It is held by process 7 (apt)", 0, 1), ("no network", 1, 0)):
            self.program("apt-get", apt)
            for name in ("said", "second"):
                (self.dir / name).unlink(missing_ok=True)
            done = self.start(["sh", ROOT / "scripts/setup.sh"], self.environment() | {"CC": "no-compiler", "MPI": "0", "WHY": why})
            self.assertEqual(done.returncode, code, done.stderr)
            said = (self.dir / "said").read_text("utf-8")
            self.assertEqual((said.count("slept 10"), said.count(" update "), said.count(" install ")), (slept, 1 + slept, slept))
            self.assertEqual(said.count("DPkg::Lock::Timeout=600"), said.count("Acquire::Retries"), said)
            if code:
                self.assertEqual(done.stderr, f"E: {why}\nsetup: this failed: apt-get update\n")

    def tree(self, prefix, name, below="", end=""):
        """A folder with a header and a library `name`."""
        for folder, file in ("include", f"{name}.h"), (f"{'lib64' if prefix == 'cuda' else 'lib'}", f"lib{name}.so{end}"):
            path = self.dir / prefix / below / folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            if folder == "include":
                path.write_text("", "utf-8")
            else:
                subprocess.run(["cc", "-shared", "-o", path, "-x", "c", os.devnull], check=True)
        return self.dir / prefix

    def test_find(self):
        """A library is found from every variable, at the compiler, in pkg-config and pip's packages, in this order."""
        environment, places = self.environment() | {"CC": "cc"}, []
        find = lambda: self.start(["sh", ROOT / "scripts/find.sh", "fake", "fake.h", "other", "fake"], environment)
        self.assertEqual((find().returncode, find().stdout, find().stderr), (0, "", ""))
        pip = environment["PIP"] = str(self.tree("pip", "fake", end=".2"))
        places.append(f"-I{pip}/include -L{pip}/lib -Wl,-rpath,{pip}/lib -l:libfake.so.2")
        self.assertEqual(find().stdout.strip(), places[-1])
        package = self.tree("package", "fake")
        (self.dir / "fake.pc").write_text(f"Name: fake\nDescription: fake\nVersion: 1\nCflags: -I{package}/include\n"
                                          f"Libs: -L{package}/lib -lfake\n", "utf-8")
        environment["PKG_CONFIG_PATH"] = str(self.dir)
        if shutil.which("pkg-config"):
            self.assertEqual(find().stdout.strip(), f"-I{package}/include -L{package}/lib -lfake")
        module = self.tree("module", "fake")
        environment |= {"CPATH": f"{module}/include", "LIBRARY_PATH": f"{module}/lib"}
        self.assertEqual(find().stdout.strip(), "-lfake")
        for variable, prefix, below in (("CONDA_PREFIX", "conda", "targets/x86_64-linux"), ("CUDA_HOME", "cuda", ""), ("NCCL_HOME", "nccl", "")):
            environment[variable] = str(self.tree(prefix, "fake", below))
            self.assertIn(f"-L{self.dir / prefix / below}/lib", find().stdout)
        del environment["CPATH"]
        (self.dir / "nccl/include/fake.h").unlink()  # a library without its header is not taken
        self.assertIn(f"-L{self.dir}/cuda/lib64", find().stdout)

    def test_flags_of_the_cuda_build(self):
        """The CUDA build compiles and links with the NCCL of NCCL_HOME, and cuBLAS of CUDA_HOME, whose nvcc it takes."""
        nccl, cuda = self.tree("nccl", "nccl"), self.tree("cuda", "cublasLt")
        shutil.copytree(self.dir / "bin", cuda / "bin")
        done = self.start(["make", "-n", "cuda", "MPI=0", "ARCHS=80"], self.environment() | {"NCCL_HOME": str(nccl), "CUDA_HOME": str(cuda)})
        link = re.search(r"(?m)^.*LINK .*$", done.stdout)[0]
        for flag in (f"{cuda}/bin/nvcc", f"-I{nccl}/include", f"-L{nccl}/lib", f"-Xlinker -rpath,{nccl}/lib", "-l:libnccl.so",
                     f"-L{cuda}/lib64", "-l:libcublasLt.so"):
            self.assertIn(flag, link)

    def test_nvcc_of_pip(self):
        """An nvcc of pip's packages is taken where PATH has none."""
        nvcc = self.dir / "site/nvidia/cu13/bin/nvcc"
        nvcc.parent.mkdir(parents=True)
        (self.dir / "bin/nvcc").rename(nvcc)
        done = self.start(["make", "-pn", "help", "MPI=0", f"PYTHON={sys.executable}"],
                          self.environment() | {"PATH": f"{self.dir}/bin:/usr/bin:/bin", "PYTHONPATH": f"{self.dir}/site"})
        if not shutil.which("nvcc", path="/usr/bin:/bin"):
            self.assertRegex(done.stdout, rf"(?m)^HAVE_NVCC := {re.escape(str(nvcc))}$")

    def test_skipped_before_tests(self):
        """make test-skipped needs the list of make test, which may be empty."""
        done = self.start(["make", "test-skipped"])
        self.assertIn("error: no build/skipped: run make test first", done.stderr)
        self.assertNotEqual(done.returncode, 0)
        (self.dir / "build").mkdir()
        (self.dir / "build/skipped").touch()
        self.assertIn("make test skipped no Python test", self.start(["make", "test-skipped"]).stdout)

    def test_probe(self):
        """The probe prints the folder of a library, or the commands that install it, and the reason for the CPU build alone."""
        self.program("nvidia-smi", "echo A card, 8.9, 580.1\n")
        say = lambda **names: self.start(["sh", ROOT / "scripts/probe.sh"], self.environment() | names).stdout
        text = say(CBLAS_LIB="-I/o/include -L/o/lib -lopenblas", ZLIB="-lz")
        for line in (r"GPU +A card, 8\.9, 580\.1", r"nvcc +none: the CPU build alone is made, although there is a GPU: .*compiler.*",
                     r" +Debian: apt install cuda-toolkit.*; conda: conda install -c conda-forge cuda-nvcc .*; cluster: module load cuda",
                     r"CBLAS +-lopenblas, from /o/lib", r"zlib +-lz, from folders of the compiler"):
            self.assertRegex(text, f"(?m)^{line}$")
        self.assertEqual(len(re.findall("(?m)^nvcc", text)), 1)
        text = say(HAVE_NVCC=str(self.dir / "bin/nvcc"), MPI="0")
        for name, package in (("NCCL", "nccl"), ("Open MPI", "openmpi"), ("CBLAS", "openblas"), ("zlib", "zlib")):
            self.assertRegex(text, rf"(?m)^{name} +none: .*\n +Debian: apt install .*-c conda-forge {package}; .*module load {package}$")

    def test_report(self):
        """bench/report.sh on a GPU, with a script in the place of the program: medians and shares, 16b with the layers that fit, kernels, tests.

        The step of 4 ms: 700 tokens/s x 40e9 FLOPs of 100e12, and 28 x 100e6 bytes at 2e12 a second, 1.4 ms; 16b 20."""
        program = """#!/bin/sh
case "$*" in
    --version) echo train_moe 1;;
    *--dry-run*) layers=${*##*--layers }; [ "${layers%% *}" -le "$FIT" ]; exit $?;;
    *"--model debug"*) echo out of GPU memory; exit 1;;
    *) echo "device     A card, ${TRAIN_MOE_KERNELS:-$OWN} kernels"
       echo "model      a: b: 100.0e6 parameters (20.00e6 active a token), 40.00e9 FLOPs a token at seq-len 9"
       for at in "99 ms 28" "99 ms 28" "5 ms 560" "3.5 ms 800" "   4 ms      700"; do
           echo "step 1/9  loss 1  norm 1  lr 1.00e-03  $at tok/s  load 1  ETA 0:00:00"; done;;
esac
"""
        for name, text in (("bin/nvidia-smi", "#!/bin/sh\necho A card, 580.1, 24576, 450\n"), ("build/cuda/train_moe", program),
                           ("bin/make", '#!/bin/sh\n[ "$1" != test ] || { echo 7 passed, 0 failed, 0 skipped; exit 0; }\n'),
                           ("build/cuda/bench/peaks", "#!/bin/sh\necho 'matmul    100.0 TFLOP/s: bf16'\necho 'copy      2.000 TB/s: both ways'\n"),
                           ("build/cuda/bench/memory", "#!/bin/sh\necho copies\n"), ("build/cuda/bench/grouped_gemm", "#!/bin/sh\necho matmuls\n")):
            (self.dir / name).parent.mkdir(parents=True, exist_ok=True)
            (self.dir / name).write_text(text, "utf-8")
            (self.dir / name).chmod(0o755)
        (self.dir / "bench").unlink()
        (self.dir / "bench").mkdir()
        shutil.copy(ROOT / "bench/report.sh", self.dir / "bench")
        report = lambda own, fit: self.start(["sh", self.dir / "bench/report.sh"], self.environment() |
                                             {"PYTHON": sys.executable, "OWN": own, "FIT": str(fit)})
        done = report("own", 3)
        self.assertEqual(done.returncode, 0, done.stdout)
        said = ["builds build/cuda/train_moe; this takes minutes", "makes shards of data/repository.txt.xz", "the card's own rates",
                "how many layers of 16b fit, 4 at most (--dry-run)"]
        said += [f"{model}, {kernels}" for kernels in ("default", "portable") for model in ("tiny", "debug", "small", "16b")]
        said += ["kernels: RMSNorm, then the matmuls of experts", "make test; this takes minutes"]
        self.assertEqual(done.stderr.splitlines(), [f"report: {phase}" for phase in said])
        speed = "4 ms, 700 tokens/s, matmul 28.0 %, AdamW "
        for line in ("program   train_moe 1", "GPU, driver, MiB, W   A card, 580.1, 24576, 450", "matmul    100.0 TFLOP/s: bf16",
                     "copy      2.000 TB/s: both ways", "device, default: A card, own kernels", "device, portable: A card, portable kernels",
                     f"tiny, default: {speed}35.0 %; --model tiny --optimizer adamw --steps 2000", "debug, portable: failed: out of GPU memory",
                     "copies", "matmuls", "make test: exit code 0, 7 passed, 0 failed, 0 skipped"):
            self.assertIn(line, done.stdout.splitlines())
        self.assertRegex(done.stdout, rf"(?m)^16b, portable: {speed}25.0 %; .* --layers 3$")
        # Portable kernels that are the card's own are measured once.
        for fit, said in ((0, "no layer fits"), (27, r".* --layers 4")):
            text = report("portable", fit).stdout
            self.assertEqual(re.findall(r"(?m)^small, (\w+): ", text), ["default"])
            self.assertRegex(text, rf"(?m)^16b[a-z, ]*: {said}$")

    def test_dockerfile(self):
        """The image has every package of setup.sh and what scripts and pages call. Its build does not run as root, and any user may
        use it."""
        packages = re.findall(r'(?:missing|wanted)="(?:\$\w+)? ([^"$]+)"', (ROOT / "scripts/setup.sh").read_text("utf-8"))
        names, lines = {name for group in packages for name in group.split()}, (ROOT / "Dockerfile").read_text("utf-8")
        self.assertLessEqual({"zlib1g-dev", "libopenblas-dev", "openmpi-bin"}, names)
        self.assertEqual(names - set(lines.split()), set())
        texts = [path.read_text("utf-8") for folder in ("scripts", "docs") for path in sorted((ROOT / folder).glob("*.[sm][hd]"))]
        for call, packages in ((r"\bcurl -", {"curl", "ca-certificates"}), (r"python3 -m venv", {"python3-venv"}),
                               (r"\bpip install", {"python3-pip"}), (r"\bgit ", {"git"}), (r"\bmpirun ", {"openmpi-bin"}),
                               (r"\bjq -", {"jq"}), (r"\bnvcc\b", {"g++"})):
            self.assertTrue(any(re.search(call, text) for text in texts), call)
            self.assertEqual(packages - set(lines.split()), set())
        self.assertRegex(lines, r'docker run .*--user "\$\(id -u\):\$\(id -g\)"')
        self.assertRegex(lines, r"(?s)^USER (?!root).*^RUN make".replace("^", "(?m:^)"))
        # Recipes download into data/corpus: any user may write there, the text stays after the run, and it is no part of the image.
        folder = "data/corpus"
        self.assertIn(f"{folder}/fineweb", (ROOT / "scripts/recipes/text.sh").read_text("utf-8"))
        self.assertRegex(lines, rf'-v "\$PWD/{folder}:/train_moe/{folder}"(?s:.*)mkdir -p {folder} && chmod a\+rwX \. {folder} ')
        kept = {line.strip("/") for line in (ROOT / ".gitignore").read_text("utf-8").splitlines() if line.startswith("/") and line.endswith("/")}
        self.assertEqual(kept - set((ROOT / ".dockerignore").read_text("utf-8").split()), set())

    def environment(self):
        hidden = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "CUDA_HOME", "NCCL_HOME", "CONDA_PREFIX", "MPI", "ARCHS", "WERROR")
        environment = {name: value for name, value in os.environ.items() if name not in hidden}
        return environment | {"PATH": f"{self.dir}/bin:{environment['PATH']}"}

    def made(self, *arguments):
        """The objects that `make` compiles."""
        done = self.start(["make", "MPI=0", *arguments])
        self.assertEqual(done.returncode, 0, done.stderr)
        return {line.split()[1] for line in done.stdout.splitlines() if line.startswith("  NVCC")}

    def test_other_gpus(self):
        """For other GPUs only kernels are compiled again, also after a benchmark was built."""
        first = self.made("cuda", "ARCHS=80")
        self.assertLessEqual({"build/cuda/train_moe.o", "build/cuda/layers/matmul.o", "build/cuda/data/json.o"}, first)
        self.assertEqual(self.made("cuda", "ARCHS=80"), set())
        self.assertEqual(self.made("build/cuda/bench/casts", "ARCHS=80"), {"build/cuda/bench/casts.o"})
        kernels = {name for name in first if (ROOT / name.removeprefix("build/cuda/")).with_suffix(".cu").exists()}
        self.assertEqual(self.made("cuda", "ARCHS=120"), kernels)
        self.assertEqual(self.made("cuda", "ARCHS=120"), set())


class Run(unittest.TestCase):
    def folder_with_run(self, folder):
        """A folder of tests with a copy of run.py, which needs scripts/ beside it."""
        tests = pathlib.Path(folder, "tests")
        tests.mkdir()
        shutil.copy(ROOT / "tests/run.py", tests)
        tests.with_name("scripts").symlink_to(ROOT / "scripts")
        return tests

    def test_what_lacks_its_program_is_skipped(self):
        with tempfile.TemporaryDirectory(prefix="test_build_") as folder:
            tests = self.folder_with_run(folder)
            for name, begins in ("ops/test_alone", ""), ("model/test_program", "import cli\n"):
                (tests / name).parent.mkdir()
                (tests / f"{name}.py").write_text(begins + "print('2 passed, 0 failed, 0 skipped')\n", "utf-8")
            done, one = [subprocess.run([sys.executable, tests / "run.py", *named], cwd=cwd, capture_output=True, encoding="utf-8")
                         for cwd, named in ((tests, ()), (ROOT, ("ops/test_alone.py",)))]
        self.assertRegex(done.stdout, r"(?m)^model/test_program\.py +skipped: needs --program$")
        self.assertTrue(done.stdout.endswith("\n2 passed, 0 failed, 1 skipped\n"), done.stdout)
        self.assertTrue(one.stdout.endswith("\n2 passed, 0 failed, 0 skipped\n"), one.stdout)

    def test_what_was_skipped_is_listed(self):
        """So that it runs again once the packages are there; a slow file is not in `make test`, and a C test has none."""
        with tempfile.TemporaryDirectory(prefix="test_build_") as folder:
            tests = self.folder_with_run(folder)
            for name, begins, skipped in (("a", "", 0), ("b", "", 1), ("slow", "SLOW = True\n", 1)):
                (tests / f"test_{name}.py").write_text(f"{begins}print('2 passed, 0 failed, {skipped} skipped')\n", "utf-8")
            (tests / "test_c").write_text("#!/bin/sh\necho 0 passed, 0 failed, 1 skipped\n", "utf-8")
            (tests / "test_c").chmod(0o755)
            subprocess.run([sys.executable, tests / "run.py", "--part", "fast", "--list-skipped", tests / "list", tests / "test_c"],
                           check=True, capture_output=True)
            self.assertEqual((tests / "list").read_text("utf-8"), f"{tests}/test_b.py\n")


class Profile(unittest.TestCase):
    def test_kernels_have_a_class(self):
        classes = re.findall(r'^    \{"(\w+)", "([^"]+)"\},$', (ROOT / "bench/profile.cc").read_text("utf-8"), re.M)
        found = {}
        for folder in ("moe", "grouped", "layers", "mx", "parallel"):
            for path in (ROOT / folder).glob("*.cu*"):
                for kernel in re.findall(r"__global__ void (?:[A-Z_]+(?:\(\w+\))?\s+|__\w+__\(.*\)\s+)*([a-z]\w+)\(", path.read_text("utf-8")):
                    found[kernel] = next((name for part, name in classes if part in kernel), None)
        self.assertLessEqual({"count_margins", "cross_entropy_kernel", "choose", "permute_rows_kernel"}, found.keys())
        self.assertEqual([kernel for kernel, name in found.items() if not name], [])
        self.assertEqual(found["attention_sum_rope_kernel"], "attention")
        self.assertEqual(found["swiglu_backward_both_kernel"], "SwiGLU")
        self.assertEqual(found["channels_kernel"], "quantization")


if __name__ == "__main__":
    unittest.main()
