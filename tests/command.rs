//! The `gpupool` command, run as a user runs it: on simcuda, and where there is no driver.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn library() -> PathBuf {
    root().join("target/release/libgpupool.so")
}

/// `exe` with simcuda as its driver and nothing of the library's in its environment.
fn bare(exe: impl AsRef<OsStr>) -> Command {
    let mut c = Command::new(exe);
    for (name, _) in std::env::vars_os() {
        if name.as_bytes().starts_with(b"GPUPOOL_") || name.as_bytes().starts_with(b"SIMCUDA_") {
            c.env_remove(name);
        }
    }
    c.env_remove("LD_PRELOAD").env("LD_LIBRARY_PATH", root().join("target/simcuda"));
    c
}

/// The command, told where the library is: the test build has none beside it.
fn gpupool() -> Command {
    let mut c = bare(env!("CARGO_BIN_EXE_gpupool"));
    c.env("GPUPOOL_LIBRARY", library());
    c
}

/// What it printed, with the exit code it must end with.
fn output(c: &mut Command, code: i32) -> (String, String) {
    let out: Output = c.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (stdout, stderr) = (text(&out.stdout), text(&out.stderr));
    assert_eq!(out.status.code(), Some(code), "{c:?}\n{stdout}{stderr}");
    (stdout, stderr)
}

/// A folder of this test's own.
fn scratch(name: &str) -> PathBuf {
    let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("command").join(name);
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(&dir).unwrap();
    dir
}

/// Runs a line of shell in `dir`. Files to be executed are written by it: one that this process writes could be held open by a
/// child of another test for a moment, and then it cannot be executed.
fn shell(dir: &Path, line: &str) {
    output(Command::new("sh").args(["-ec", line]).current_dir(dir), 0);
}

/// The value of a variable in the output of `env`.
fn value<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix('='))
}

#[test]
fn help_names_every_option_and_what_cannot_be_seen() {
    let (text, _) = output(gpupool().arg("--help"), 0);
    assert!(["run", "doctor", "GPUPOOL_LIBRARY"].iter().all(|w| text.contains(w)), "{text}");
    let (text, _) = output(gpupool().args(["run", "--help"]), 0);
    for part in ["--max-percent", "--max-mem", "--free", "--report", "--log", "LD_PRELOAD", "GPUPOOL_FREE", "127"] {
        assert!(text.contains(part), "{part} is missing:\n{text}");
    }
    let (doctor, _) = output(gpupool().args(["doctor", "--help"]), 0);
    assert!(doctor.contains("RTLD_DEEPBIND") && doctor.contains("dlmopen"), "{doctor}");
    for line in text.lines().chain(doctor.lines()) {
        assert!(line.chars().count() <= 110, "too wide for a terminal: {line}");
    }
    assert!(output(gpupool().arg("--version"), 0).0.contains(env!("CARGO_PKG_VERSION")));
    // Without a word of what to do: help, and not as an answer.
    let (stdout, stderr) = output(&mut gpupool(), 2);
    assert!(stdout.is_empty() && stderr.contains("Usage:") && !stderr.contains("gpupool: "), "{stderr}");
}

#[test]
fn a_closed_standard_error_keeps_the_exit_code() {
    let full = || std::fs::File::create("/dev/full").unwrap();
    for (args, code) in [(&["run", "--free", "foo", "ls"][..], 2), (&["run", "no-such-program"], 127)] {
        assert_eq!(gpupool().args(args).stderr(full()).status().unwrap().code(), Some(code));
    }
}

#[test]
fn run_sets_what_it_was_told_and_nothing_else() {
    let (text, _) = output(gpupool().args(["run", "--report", "--max-percent", "40", "--", "env"]), 0);
    assert_eq!(value(&text, "LD_PRELOAD"), library().to_str());
    assert_eq!(value(&text, "GPUPOOL_REPORT"), Some("1"));
    assert_eq!(value(&text, "GPUPOOL_MAX_MEM_PERCENT"), Some("40"));
    for name in ["GPUPOOL_MAX_MEM", "GPUPOOL_FREE", "GPUPOOL_LOG", "GPUPOOL_INTERPOSE"] {
        assert_eq!(value(&text, name), None, "{name}");
    }
    let mut c = gpupool();
    c.args(["run", "--max-mem=12g", "--free", "barrier", "--log", "error", "env"]).env("GPUPOOL_FREE", "sync");
    let (text, _) = output(c.env("GPUPOOL_SLACK", "7"), 0);
    assert_eq!(value(&text, "GPUPOOL_MAX_MEM"), Some("12g"));
    assert_eq!(value(&text, "GPUPOOL_FREE"), Some("barrier"), "an option overrides the variable");
    assert_eq!(value(&text, "GPUPOOL_LOG"), Some("error"));
    assert_eq!(value(&text, "GPUPOOL_SLACK"), Some("7"), "other settings stay");
    assert_eq!(value(&text, "GPUPOOL_REPORT"), None);
}

#[test]
fn run_keeps_what_was_preloaded_before() {
    let before = root().join("target/simcuda/libcudart.so.13");
    let run = |before: String| output(gpupool().args(["run", "env"]).env("LD_PRELOAD", before), 0).0;
    let both = format!("{}:{}", library().display(), before.display());
    assert_eq!(value(&run(before.display().to_string()), "LD_PRELOAD"), Some(&*both));
    // In front, once, whatever the separator was.
    let text = run(format!("{} {}", before.display(), library().display()));
    assert_eq!(value(&text, "LD_PRELOAD"), Some(&*both));
    assert_eq!(value(&run(String::new()), "LD_PRELOAD"), library().to_str());
}

#[test]
fn run_becomes_the_program() {
    output(gpupool().args(["run", "sh", "-c", "exit 7"]), 7);
    let mut child = gpupool().args(["run", "sh", "-c", "echo $$"]).stdout(Stdio::piped()).spawn().unwrap();
    let id = child.id();
    child.wait().unwrap();
    let said = std::io::read_to_string(child.stdout.take().unwrap()).unwrap();
    assert_eq!(said.trim(), id.to_string(), "the process id");
    // A Rust program ignores SIGPIPE; the program that it becomes must not.
    for signal in [libc::SIGTERM, libc::SIGPIPE] {
        let status = gpupool().args(["run", "sh", "-c", &format!("kill -{signal} $$")]).status().unwrap();
        assert_eq!(status.signal(), Some(signal));
    }
}

#[test]
fn run_hands_arguments_on_byte_by_byte() {
    let odd = ["a b", "", "'\"$HOME\\", "--report", "--", "*", "-x"];
    for start in [&["run", "printf", "[%s]"][..], &["run", "--", "printf", "[%s]"]] {
        let mut c = gpupool();
        c.args(start).args(odd).arg(OsStr::from_bytes(b"\xff\xfe"));
        let out = c.output().unwrap().stdout;
        let wanted: Vec<u8> = odd.iter().flat_map(|a| format!("[{a}]").into_bytes()).chain(*b"[\xff\xfe]").collect();
        assert_eq!(String::from_utf8_lossy(&out), String::from_utf8_lossy(&wanted));
        assert_eq!(out, wanted);
    }
}

#[test]
fn run_says_why_a_program_cannot_start() {
    let dir = scratch("unstartable");
    shell(&dir, "echo text >plain; printf '#!/nowhere/sh\\n' >orphan; chmod +x orphan");
    for (name, code, why) in [
        ("no-such-program", 127, "no-such-program: program not found"),
        ("./no-such-program", 127, "program not found"),
        ("./orphan", 127, "interpreter"),
        ("./plain", 126, "cannot be executed"),
        ("/", 126, "cannot be executed"),
    ] {
        let (stdout, stderr) = output(gpupool().args(["run", name]).current_dir(&dir), code);
        assert!(stderr.starts_with("gpupool: ") && stderr.contains(why) && stderr.lines().count() == 1, "{stderr}");
        assert_eq!(stdout, "");
    }
}

#[test]
fn run_refuses_bad_options_before_anything_runs() {
    let (size, percent) =
        ("wanted: a size, over 0: bytes, or with k, m, g or t, as 512m", "wanted: a number, over 0 to 100");
    for (bad, why) in [
        (&["--max-percent", "0"][..], percent),
        (&["--max-percent", "101"], percent),
        (&["--max-percent", "-5"], percent),
        (&["--max-percent", "nan"], percent),
        (&["--max-percent", "abc"], percent),
        (&["--max-mem", "0"], size),
        (&["--max-mem", "-5"], size),
        (&["--max-mem", "-5g"], size),
        (&["--max-mem", "12x"], size),
        (&["--max-mem="], size),
        (&["--max-mem", "99999999999999999999g"], size),
        (&["--free", "foo"], "wanted: order, barrier or sync"),
        (&["--log", "loud"], "wanted: off, error, warn, info, debug or trace"),
        (&["--no-such-option"], "unexpected argument"),
    ] {
        let (stdout, stderr) = output(gpupool().arg("run").args(bad).args(["--", "echo", "ran"]), 2);
        assert_eq!(stdout, "");
        let option = bad[0].trim_end_matches('=');
        assert!(stderr.starts_with("gpupool: ") && stderr.contains(option) && stderr.contains(why), "{stderr}");
    }
    // What is no option's.
    for (bad, why) in
        [(&["run"][..], "<PROGRAM>"), (&["rum"], "'rum'"), (&["doctor", "a", "b"], "'b'"), (&["--bad"], "'--bad'")]
    {
        let (stdout, stderr) = output(gpupool().args(bad), 2);
        assert_eq!(stdout, "");
        assert!(stderr.starts_with("gpupool: ") && stderr.contains(why) && stderr.contains("--help"), "{stderr}");
    }
}

#[test]
fn the_library_is_found_where_it_is_installed() {
    let dir = scratch("tree");
    for folder in ["bin", "lib", "lib64"] {
        std::fs::create_dir(dir.join(folder)).unwrap();
    }
    let exe = dir.join("bin/gpupool");
    std::fs::hard_link(env!("CARGO_BIN_EXE_gpupool"), &exe).unwrap();
    let (_, stderr) = output(bare(&exe).args(["run", "env"]), 2);
    for place in ["bin", "lib", "lib64"] {
        assert!(stderr.contains(&format!("{}", dir.join(place).display())), "{place}: {stderr}");
    }
    let preload = |c: &mut Command| value(&output(c.args(["run", "env"]), 0).0, "LD_PRELOAD").map(PathBuf::from);
    // Each place goes before those already filled.
    for place in ["lib64/libgpupool.so.0", "lib/libgpupool.so.0", "lib/libgpupool.so", "bin/libgpupool.so"] {
        let path = dir.join(place);
        symlink(library(), &path).unwrap();
        assert_eq!(preload(&mut bare(&exe)), Some(path));
    }
    // Through a link to the command, and by a relative path.
    symlink(&exe, dir.join("link")).unwrap();
    assert_eq!(preload(&mut bare(dir.join("link"))), Some(dir.join("bin/libgpupool.so")));
    let mut named = bare(&exe);
    named.current_dir(&dir).env("GPUPOOL_LIBRARY", "lib/libgpupool.so.0");
    assert_eq!(preload(&mut named), Some(dir.join("lib/libgpupool.so.0")));
    // One that LD_PRELOAD cannot hold.
    symlink(library(), dir.join("a b.so")).unwrap();
    let (_, stderr) = output(bare(&exe).args(["run", "env"]).env("GPUPOOL_LIBRARY", dir.join("a b.so")), 2);
    assert!(stderr.contains("blank"), "{stderr}");
    // A file of that name beside the command that is none is told of, and not passed over.
    std::fs::remove_file(dir.join("bin/libgpupool.so")).unwrap();
    std::fs::write(dir.join("bin/libgpupool.so"), "").unwrap();
    let (_, stderr) = output(bare(&exe).args(["run", "env"]), 2);
    assert!(stderr.contains("bin/libgpupool.so: not a shared library"), "{stderr}");
}

/// The loader would say a line of its own and start the program without the pool.
#[test]
fn a_library_that_is_none_is_an_error_before_anything_runs() {
    let dir = scratch("not-the-library");
    shell(
        &dir,
        "echo text >text; : >empty; mkdir folder; head -c 4096 /bin/true >cut
         echo 'int main(void) { return 0; }' >m.c && gcc m.c -o program && gcc -c m.c -o object
         echo 'void gpupoolMalloc(void); void f(void) { gpupoolMalloc(); }' >u.c && gcc -shared -fPIC u.c -o user",
    );
    std::fs::copy(library(), dir.join("other-machine")).unwrap();
    shell(&dir, "printf '\\267' | dd of=other-machine bs=1 seek=18 conv=notrunc 2>/dev/null");
    for (file, why) in [
        ("missing", "there is no such file"),
        ("folder", "not a file"),
        ("text", "not a shared library of 64-bit x86"),
        ("empty", "not a shared library"),
        ("cut", "not a shared library"),
        ("object", "not a shared library"),
        ("other-machine", "not a shared library"),
        ("program", "not gpupool's"),
        ("user", "not gpupool's"),
    ] {
        let named = dir.join(file);
        let (stdout, stderr) = output(gpupool().args(["run", "echo", "ran"]).env("GPUPOOL_LIBRARY", &named), 2);
        assert_eq!(stdout, "", "{file}");
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
        let says = format!("gpupool: GPUPOOL_LIBRARY={}: ", named.display());
        assert!(stderr.starts_with(&says) && stderr.contains(why), "{file}: {stderr}");
        let (stdout, _) = output(gpupool().arg("doctor").env("GPUPOOL_LIBRARY", &named), 1);
        assert!(stdout.contains(&format!("library:  GPUPOOL_LIBRARY={}: ", named.display())), "{file}: {stdout}");
    }
}

#[test]
fn doctor_tells_of_the_library_the_driver_and_the_devices() {
    let (text, _) = output(gpupool().arg("doctor"), 0);
    assert!(text.contains(&format!("library:  {}\n", library().display())), "{text}");
    let driver = root().join("target/simcuda/libcuda.so.1");
    assert!(text.contains(&format!("driver:   CUDA 13.0, {}\n", driver.display())), "{text}");
    let device = "simcuda software GPU, 8192 MiB; VMM yes, shareable by descriptor yes, RDMA yes";
    assert!(text.contains(&format!("device 0: {device}\ndevice 1: {device}\n")), "{text}");
    assert!(text.contains("GPUPOOL_FREE=order works"), "{text}");
    assert_eq!(text.lines().count(), 5, "{text}");

    let mut old = gpupool();
    old.arg("doctor").env("SIMCUDA_DRIVER", "12040").env("SIMCUDA_VMM", "0").env("SIMCUDA_DEVICES", "1");
    let (text, _) = output(&mut old, 0);
    assert!(text.contains("CUDA 12.4") && text.contains("VMM no") && !text.contains("device 1"), "{text}");
    assert!(text.contains("GPUPOOL_FREE=sync") && !text.contains("order works"), "{text}");
}

#[test]
fn doctor_looks_at_the_settings() {
    let doctor = |name: &str, value: &str, code| output(gpupool().arg("doctor").env(name, value), code).0;
    assert!(doctor("GPUPOOL_MAX_MEM", "12GiB", 0).contains("setting:  GPUPOOL_MAX_MEM=12GiB\n"));
    let text = doctor("GPUPOOL_MAX_MEM", "12x", 1);
    assert!(text.contains("setting:  GPUPOOL_MAX_MEM=12x is not taken; wanted: a size, over 0"), "{text}");
    assert_eq!(text.matches("GPUPOOL_MAX_MEM").count(), 1, "{text}");
    let text = doctor("GPUPOOL_MAXMEM", "12g", 1);
    assert!(
        text.contains("setting:  GPUPOOL_MAXMEM is no setting and has no effect; is GPUPOOL_MAX_MEM meant?"),
        "{text}"
    );
    // A program may have variables that begin so.
    assert!(doctor("GPUPOOL_HOME", "x", 0).contains("note:     GPUPOOL_HOME is no setting of the library"));
    assert_eq!(doctor("GPUPOOL_LOG", "", 0).lines().count(), 5, "an empty value is no value");
    // Not wrong by itself, but no program is reached.
    let text = doctor("GPUPOOL_INTERPOSE", "0", 0);
    assert!(text.contains("note:     GPUPOOL_INTERPOSE=0 is set"), "{text}");
    output(gpupool().args(["doctor", "env"]).env("GPUPOOL_INTERPOSE", "0"), 1);
    output(gpupool().args(["doctor", "env"]).env("GPUPOOL_INTERPOSE", "1"), 0);
}

#[test]
fn doctor_answers_1_when_something_is_missing() {
    // An empty file in the driver's place: no driver, on a machine that has one too.
    let dir = scratch("no-driver");
    std::fs::write(dir.join("libcuda.so.1"), "").unwrap();
    let (text, _) = output(gpupool().args(["doctor", "ls"]).env("LD_LIBRARY_PATH", &dir), 1);
    assert!(text.contains("driver:   no CUDA driver here (") && text.contains("program:  "), "{text}");
    let (text, _) = output(gpupool().arg("doctor").env("SIMCUDA_DEVICES", "0"), 1);
    assert!(text.contains("does not start: error 100 (CUDA_ERROR_NO_DEVICE)"), "{text}");
    let (text, _) = output(gpupool().arg("doctor").env("GPUPOOL_LIBRARY", "/nowhere/lib.so"), 1);
    assert!(
        text.contains("/nowhere/lib.so: there is no such file") && text.contains("CUDA 13.0"),
        "the rest is told too: {text}"
    );
    let (text, _) = output(gpupool().arg("doctor").env("SIMCUDA_FAIL", "cuDeviceTotalMem_v2:2:999"), 1);
    assert!(text.contains("device 1: error 999"), "{text}");
    assert!(output(gpupool().args(["doctor", "no-such-program"]), 1).0.contains("no-such-program: not found"));
}

/// What doctor says of a program, and with which exit code.
fn verdict(program: impl AsRef<OsStr>, code: i32) -> String {
    let (text, _) = output(gpupool().arg("doctor").arg(program), code);
    let line = text.lines().last().unwrap().to_string();
    assert!(line.starts_with("program:  "), "{text}");
    line
}

#[test]
fn doctor_knows_the_doors_of_the_c_programs() {
    let text = verdict(root().join("target/c/quickstart"), 0);
    assert!(text.contains("links libcudart.so.13: reached by the runtime door; linked to libgpupool too"), "{text}");
    let text = verdict(root().join("target/c/static_runtime"), 0);
    assert!(text.contains("has CUDA's runtime inside: reached by the driver door"), "{text}");
    // By name, and without CUDA.
    let text = verdict("env", 0);
    assert!(text.contains("/env: ") && text.contains("should it load CUDA at run time"), "{text}");
}

#[test]
fn doctor_looks_through_libraries_and_at_the_driver() {
    let dir = scratch("libraries");
    let sim = root().join("target/simcuda");
    let sim = sim.display();
    shell(
        &dir,
        &format!(
            "echo 'int main(void) {{ extern int f(void); return f(); }}' >main.c
             echo 'int cudaGetDevice(int *); int f(void) {{ int d; return cudaGetDevice(&d); }}' >shared.c
             echo 'int f(void) {{ static const char n[] = \"cuGetProcAddress_v2\"; return n[1]; }}' >inside.c
             echo 'int cuInit(int); int f(void) {{ return cuInit(0); }}' >direct.c
             gcc -shared -fPIC shared.c -o libshared.so {sim}/libcudart.so.13
             gcc -shared -fPIC inside.c -o libinside.so
             for lib in shared inside; do
               gcc main.c -o $lib -L. -l$lib -Wl,-rpath,$PWD -Wl,--unresolved-symbols=ignore-all
             done
             gcc main.c direct.c -o direct {sim}/libcuda.so.1"
        ),
    );
    for (program, says) in [
        ("shared", "links libcudart.so.13: reached by the runtime door"),
        ("inside", "its libinside.so has CUDA's runtime inside: reached by the driver door"),
        ("direct", "links libcuda.so.1: reached by the driver door"),
    ] {
        let text = verdict(dir.join(program), 0);
        assert!(text.ends_with(says), "{text}");
    }
    // The loader cannot list a program with a damaged library: what the program itself names still counts.
    std::fs::write(dir.join("libcuda.so.1"), "").unwrap();
    let (text, _) = output(gpupool().arg("doctor").arg(dir.join("direct")).env("LD_LIBRARY_PATH", &dir), 1);
    assert!(text.ends_with("links libcuda.so.1: reached by the driver door\n"), "{text}");
}

#[test]
fn doctor_says_why_a_program_is_not_reached() {
    let dir = scratch("unreached");
    shell(
        &dir,
        "echo 'void _start(void) { for (;;) {} }' >s.c && gcc -nostdlib -static s.c -o static
         echo 'int main(void) { return 0; }' >m.c && gcc m.c -o musl -Wl,--dynamic-linker=/lib/ld-musl-x86_64.so.1
         gcc m.c -o setuid && chmod u+s setuid
         gcc m.c -o setgid && chmod g+s setgid
         gcc m.c -o narrow && printf '\\001' | dd of=narrow bs=1 seek=4 conv=notrunc 2>/dev/null
         gcc m.c -o cut && truncate -s 100 cut
         echo words >words && chmod +x words
         echo words >plain",
    );
    for (program, code, says) in [
        ("static", 1, "statically linked"),
        ("musl", 1, "musl"),
        ("setuid", 1, "setuid: the loader ignores LD_PRELOAD"),
        ("setgid", 1, "setgid: the loader ignores LD_PRELOAD"),
        ("narrow", 1, "not a 64-bit x86 program"),
        ("cut", 1, "damaged"),
        ("plain", 1, "not executable"),
        // Nothing speaks against it.
        ("words", 0, "nothing can be told"),
    ] {
        let text = verdict(dir.join(program), code);
        assert!(text.contains(says) && !text.contains("reached by"), "{program}: {text}");
    }
}

#[test]
fn doctor_follows_scripts_to_what_runs_them() {
    let dir = scratch("scripts");
    let quickstart = root().join("target/c/quickstart");
    shell(
        &dir,
        &format!(
            "printf '#!{}\\n' >direct; printf '#! /usr/bin/env -S A=1 ./python3.12 -u\\n' >env
             printf '#!/nowhere/x\\n' >orphan; printf '#!./loop\\n' >loop; printf '#!/bin/sh' >sh
             printf 'int main(void) {{ return 0; }}' >m.c; gcc m.c -o python3.12; chmod +x direct env orphan loop sh",
            quickstart.display()
        ),
    );
    for (script, code, says) in [
        ("direct", 0, "a script for ".to_string() + quickstart.to_str().unwrap() + ": links libcudart.so.13"),
        ("env", 0, "python3.12: loads CUDA at run time: reached by the driver door when it does".into()),
        ("orphan", 1, "interpreter /nowhere/x is not found".into()),
        ("loop", 1, "more of them than the kernel follows".into()),
        ("sh", 0, "a shell: what it starts inherits the pool".into()),
    ] {
        let (text, _) = output(gpupool().args(["doctor", &format!("./{script}")]).current_dir(&dir), code);
        assert!(text.contains(&says), "{script}: {text}");
    }
}

/// Both are built from one package; what only the command needs must not reach the library.
#[test]
fn the_library_links_nothing_of_the_command() {
    let has = |file: &str, name: &[u8]| {
        let data = std::fs::read(root().join(file)).unwrap();
        data.windows(name.len()).any(|w| w == name)
    };
    assert!(has("target/release/gpupool", b"clap_builder"), "the command's debug lines name its crates");
    assert!(!has("target/release/libgpupool.so", b"clap_builder"));
}
