"""Real interpreters that start with ck_patch installed: what start-up does, and what it leaves."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.startup.environments import COUNT_ENABLE, WAITING, Environment, loaded_modules

pytestmark = pytest.mark.startup

COUNT_FINDERS = f"import sys; print({WAITING})"
IMPORT_HOST = COUNT_ENABLE + f"import comfy_kitchen\nprint(calls, {WAITING})"

LOCALES = {
    "C": {"LC_ALL": "C"},
    "C, not coerced": {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
    "POSIX": {"LC_ALL": "POSIX", "PYTHONUTF8": "0"},
    "POSIX, not coerced": {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
    "C.utf8": {"LC_ALL": "C.utf8"},
    "unknown": {"LC_ALL": "xx_XX.ISO-8859-7", "LANG": "xx_XX.ISO-8859-7"},
    "UTF-8 mode": {"LC_ALL": "C", "PYTHONUTF8": "1"},
    "latin-1 streams": {"PYTHONIOENCODING": "latin-1"},
    "utf-16 streams": {"PYTHONIOENCODING": "ascii:replace"},
}


def test_it_runs_once_although_the_pth_file_runs_twice(clone: Environment) -> None:
    probe = clone.site_packages / "probe.pth"
    probe.write_text("import sys; sys.pth_runs = getattr(sys, 'pth_runs', 0) + 1\n")
    code = f"{IMPORT_HOST}\nprint(sys.pth_runs)"
    calls, runs = clone.output("-c", code).splitlines()
    assert calls == "[True] 0"
    assert int(runs) >= 1
    if "python3.15" not in str(clone.site_packages):
        assert int(runs) == 2


def test_start_up_adds_these_modules_and_no_other(clone: Environment) -> None:
    with_it = loaded_modules(clone)
    switched_off = loaded_modules(clone, CK_PATCH="0")
    (clone.site_packages / "ck_patch.start").unlink()
    # Not removed but emptied: from 3.13 on `site` loads a codec to read whatever .pth there is.
    (clone.site_packages / "ck_patch.pth").write_text("# nothing\n")
    without = loaded_modules(clone)
    assert with_it - without == {"ck_patch", "ck_patch._bootstrap", "ck_patch._import_hook"}
    assert switched_off - without == {"ck_patch", "ck_patch._bootstrap"}
    assert without <= with_it
    assert without <= switched_off
    heavy = {"torch", "triton", "numpy", "comfy_kitchen", "wrapt", "logging", "typing"}
    assert not with_it & heavy


@pytest.mark.parametrize("value", ["0", "false", "off", "no", " OFF "])
def test_the_kill_switch_installs_nothing(installed: Environment, value: str) -> None:
    assert installed.output("-c", COUNT_FINDERS, env={"CK_PATCH": value}) == "0"
    assert installed.output("-c", IMPORT_HOST, env={"CK_PATCH": value}) == "[] 0"


@pytest.mark.parametrize("value", ["1", "", "true", "nonsense"])
def test_any_other_value_of_the_switch_leaves_it_on(installed: Environment, value: str) -> None:
    assert installed.output("-c", IMPORT_HOST, env={"CK_PATCH": value}) == "[True] 0"


@pytest.mark.parametrize(
    ("options", "waiting"), [("-S", 0), ("-I", 1), ("-s", 1), ("-E", 1), ("-Es", 1), ("-OO", 1)]
)
def test_interpreter_options_switch_it_off_only_where_site_is_off(
    installed: Environment, options: str, waiting: int
) -> None:
    assert installed.output(options, "-c", COUNT_FINDERS) == str(waiting)


def test_isolated_mode_still_honours_the_kill_switch(installed: Environment) -> None:
    assert installed.output("-I", "-c", COUNT_FINDERS, env={"CK_PATCH": "0"}) == "0"


def test_warnings_as_errors_find_nothing_to_say(installed: Environment) -> None:
    assert installed.output("-W", "error", "-X", "dev", "-c", IMPORT_HOST) == "[True] 0"


@pytest.mark.parametrize("name", LOCALES)
def test_every_locale_starts(installed: Environment, name: str) -> None:
    assert installed.output("-c", IMPORT_HOST, env=LOCALES[name]) == "[True] 0"


@pytest.mark.parametrize("name", ["C, not coerced", "POSIX, not coerced", "C.utf8", "UTF-8 mode"])
def test_a_path_with_a_space_and_other_letters_works_in_every_locale(
    installed: Environment, tmp_path: Path, name: str
) -> None:
    environment = installed.clone(tmp_path / "My Apps" / "Ünï cödé" / "venv")
    assert environment.output("-c", IMPORT_HOST, env=LOCALES[name]) == "[True] 0"


def test_a_single_byte_locale_starts(installed: Environment, tmp_path: Path) -> None:
    localedef = shutil.which("localedef")
    command = [localedef or "", "-i", "en_US", "-f", "ISO-8859-1", str(tmp_path / "en_US")]
    if not localedef or subprocess.run(command, capture_output=True, check=False).returncode > 1:
        pytest.skip("no localedef, or no sources of locales, to make a latin-1 locale with")
    env = {"LOCPATH": str(tmp_path), "LC_ALL": "en_US", "PYTHONUTF8": "0"}
    code = f"import locale; print(locale.getpreferredencoding(False)); {COUNT_FINDERS}"
    assert installed.output("-c", code, env=env).split() == ["ISO-8859-1", "1"]


def test_nothing_there_leaves_the_host_missing_as_before(clone: Environment) -> None:
    shutil.rmtree(clone.site_packages / "comfy_kitchen")
    code = (
        "try:\n    import comfy_kitchen\n"
        "except ModuleNotFoundError as error:\n    print(error.name, error)"
    )
    with_it = clone.output("-c", code)
    assert with_it == clone.output("-c", code, env={"CK_PATCH": "0"})
    assert with_it == "comfy_kitchen No module named 'comfy_kitchen'"


def test_the_host_gets_its_real_loader_back_before_it_runs(installed: Environment) -> None:
    code = (
        "import sys, ck_patch\nck_patch.enable = lambda: None\nimport comfy_kitchen as host\n"
        "spec = host.__spec__\n"
        "print(host.seen, host.__loader__ is spec.loader, spec.loader, spec.origin, spec.cached)\n"
        "print(spec.submodule_search_locations, spec.parent, spec.has_location)"
    )

    def shown(text: str) -> str:
        return text.split(" object at ")[0] + text.split(">", 1)[1]

    with_it = installed.output("-c", code)
    assert shown(with_it) == shown(installed.output("-c", code, env={"CK_PATCH": "0"}))
    assert "ck_patch" not in with_it


def test_a_host_that_fails_is_patched_when_it_succeeds(installed: Environment) -> None:
    code = (
        COUNT_ENABLE
        + "sys.host_fails = True\n"
        + "for _ in range(2):\n"
        + "    try:\n        import comfy_kitchen\n"
        + f"    except RuntimeError as error:\n        print(error, calls, {WAITING})\n"
        + f"sys.host_fails = False\nimport comfy_kitchen\nprint(calls, {WAITING})"
    )
    failed, again, succeeded = installed.output("-c", code).splitlines()
    assert failed == again == "the host fails [] 1"
    assert succeeded == "[True] 0"


def test_threads_that_import_the_host_together_all_find_it_patched(
    installed: Environment,
) -> None:
    code = (
        "import sys, threading, time, ck_patch\n"
        "calls, seen = [], []\n"
        "def enable():\n    time.sleep(0.05)\n    calls.append(1)\n"
        "ck_patch.enable = enable\n"
        "barrier = threading.Barrier(8)\n"
        "def work():\n"
        "    barrier.wait()\n    import comfy_kitchen\n    seen.append(len(calls))\n"
        "threads = [threading.Thread(target=work) for _ in range(8)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
        f"print(seen, {WAITING})"
    )
    assert installed.output("-c", code) == "[1, 1, 1, 1, 1, 1, 1, 1] 0"


def test_a_host_that_is_there_already_is_patched_at_once(installed: Environment) -> None:
    code = (
        "import os, sys\nos.environ.pop('CK_PATCH')\nimport comfy_kitchen\n"
        + COUNT_ENABLE
        + f"import ck_patch._bootstrap as b\nb.start()\nprint(calls, {WAITING}, b.outcome)"
    )
    printed = installed.output("-c", code, env={"CK_PATCH": "0"})
    assert printed == "[True] 0 comfy_kitchen was there already"


def test_start_during_the_import_of_the_host_waits_and_harms_nothing(clone: Environment) -> None:
    clone.add_host("import ck_patch._bootstrap as b\nb.start()\nprint(b.outcome)\n")
    assert clone.output("-c", IMPORT_HOST).splitlines() == ["waits for comfy_kitchen", "[True] 0"]


def test_a_process_forked_after_start_has_a_hook_of_its_own(installed: Environment) -> None:
    code = (
        "import os\n"
        + COUNT_ENABLE
        + "child = os.fork()\n"
        + "import comfy_kitchen\n"
        + f"print(calls, {WAITING}, flush=True)\n"
        + "if child: sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )
    assert installed.output("-c", code).splitlines() == ["[True] 0"] * 2


def test_spawned_children_start_it_too(installed: Environment) -> None:
    code = (
        "import subprocess, sys\n"
        f"print(subprocess.check_output([sys.executable, '-c', {COUNT_FINDERS!r}], text=True))"
    )
    assert installed.output("-c", code) == "1"


def test_activating_again_and_again_changes_nothing(installed: Environment) -> None:
    code = (
        COUNT_ENABLE + "import importlib, ck_patch._bootstrap as b, ck_patch._import_hook as h\n"
        "b.start(); b.start()\n"
        "importlib.reload(h); importlib.reload(b); b.start()\n"
        f"print({WAITING})\nimport comfy_kitchen\nprint(calls, {WAITING})"
    )
    assert installed.output("-c", code).splitlines() == ["1", "[True] 0"]


def test_the_real_enable_without_anything_it_needs_leaves_the_host_alone(
    installed: Environment,
) -> None:
    done = installed.run("-c", "import comfy_kitchen; print(comfy_kitchen.seen)")
    assert done.returncode == 0
    assert done.stdout.strip() == str(["_frozen_importlib_external"] * 2)
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) <= 1


class TestUserSite:
    """A copy in the user's site-packages, beside an environment that sees it or does not."""

    @pytest.fixture
    def user_base(self, installed: Environment, tmp_path: Path) -> Path:
        base = tmp_path / "user"
        target = base / installed.site_packages.relative_to(installed.path)
        shutil.copytree(installed.site_packages, target)
        return base

    def see_system(self, environment: Environment) -> None:
        file = environment.path / "pyvenv.cfg"
        text = file.read_text().replace("packages = false", "packages = true")
        file.write_text(text)

    def env(self, base: Path) -> dict[str, str]:
        return {"PYTHONUSERBASE": str(base), "PYTHONNOUSERSITE": ""}

    def test_a_copy_there_and_one_in_the_environment_act_once(
        self, clone: Environment, user_base: Path
    ) -> None:
        self.see_system(clone)
        code = f"import site\nassert site.ENABLE_USER_SITE\n{IMPORT_HOST}"
        assert clone.output("-c", code, env=self.env(user_base)) == "[True] 0"

    @pytest.mark.parametrize(("options", "waiting"), [([], 1), (["-s"], 0), (["-I"], 0)])
    def test_a_copy_there_alone_is_not_seen_under_s_and_isolation(
        self,
        bare: Environment,
        tmp_path: Path,
        user_base: Path,
        options: list[str],
        waiting: int,
    ) -> None:
        environment = bare.clone(tmp_path / "venv")
        self.see_system(environment)
        printed = environment.output(*options, "-c", COUNT_FINDERS, env=self.env(user_base))
        assert printed == str(waiting)
