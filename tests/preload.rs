//! The preload door, on simcuda: `LD_PRELOAD=libgpupool.so` under programs that know nothing of it (`tests/c/preload`), under
//! the other C programs, and under programs without CUDA. `make` builds them.
//!
//! Each program of `tests/c/preload` also passes on the bare driver: its expectations are the driver's own answers.

use std::io::Write;
use std::path::PathBuf;
use std::process::Command;

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn library() -> String {
    root().join("target/release/libgpupool.so").display().to_string()
}

/// What went through a door, from a line of the report: `served A mallocs B frees, foreign C mallocs D frees`.
#[derive(Debug, Default, Clone, Copy, PartialEq)]
struct Door {
    mallocs: u64,
    frees: u64,
    foreign_mallocs: u64,
    foreign_frees: u64,
}

/// What `GPUPOOL_REPORT=1` prints at exit.
#[derive(Debug, Default)]
struct Report {
    process: u32,
    program: String,
    runtime: Door,
    driver: Door,
    gpupool: Door,
    cnmem: Door,
    pinned: (u64, u64),
    /// Allocations of each pool, and how many fences and waits it took.
    devices: Vec<(u64, u64, u64)>,
}

impl Report {
    /// The last one in the text: children print theirs before their parent ends.
    fn parse(text: &str) -> Option<Report> {
        const HEAD: &str = "gpupool: report of process ";
        let start = text.rfind(HEAD)?;
        let (process, program) = text[start + HEAD.len()..].lines().next()?.split_once(", ")?;
        let mut report = Report { process: process.parse().ok()?, program: program.into(), ..Report::default() };
        for line in text[start..].lines().skip(1) {
            let Some(line) = line.strip_prefix("gpupool: ") else { continue };
            let words: Vec<&str> = line.split([' ', ',', ':']).filter(|w| !w.is_empty()).collect();
            // The number before, or after, a word.
            let before = |word: &str, nth: usize| -> Option<u64> {
                let at = words.iter().enumerate().filter(|(_, w)| **w == word).nth(nth)?.0;
                words.get(at.checked_sub(1)?)?.parse().ok()
            };
            let door = || {
                Some(Door {
                    mallocs: before("mallocs", 0)?,
                    frees: before("frees", 0)?,
                    foreign_mallocs: before("mallocs", 1)?,
                    foreign_frees: before("frees", 1)?,
                })
            };
            match words.first().copied() {
                Some("runtime") => report.runtime = door()?,
                Some("driver") => report.driver = door()?,
                Some("gpupool") => report.gpupool = door()?,
                Some("cnmem") => report.cnmem = door()?,
                Some("pinned") => report.pinned = (before("from", 0)?, words.last()?.parse().ok()?),
                Some("device") => {
                    report.devices.push((before("mallocs", 0)?, before("fences", 0)?, before("waits", 0)?));
                }
                _ => {}
            }
        }
        Some(report)
    }

    /// What came in through the two doors of the preload.
    fn served(&self) -> u64 {
        self.runtime.mallocs + self.driver.mallocs
    }
}

/// How a program is run.
#[derive(Clone, Copy, PartialEq)]
enum With {
    Bare,
    Preload,
}

struct Outcome {
    stdout: String,
    stderr: String,
    code: Option<i32>,
}

impl Outcome {
    fn report(&self) -> Report {
        Report::parse(&self.stderr).unwrap_or_else(|| panic!("no report:\n{}\n{}", self.stdout, self.stderr))
    }

    /// The number in a closing `N passed, ...`.
    fn passed(&self) -> u32 {
        self.stdout.lines().last().and_then(|l| l.split(' ').next()).and_then(|n| n.parse().ok()).unwrap_or(0)
    }
}

/// Runs target/c/`name`. `LD_PRELOAD` is the program's alone, not that of what runs it.
fn launch(with: With, name: &str, args: &[&str], env: &[(&str, &str)]) -> Outcome {
    let mut c = Command::new("timeout");
    c.args(["-s", "KILL", "600", "env"]);
    c.arg(format!("LD_LIBRARY_PATH={0}/target/simcuda:{0}/target/release", root().display()));
    c.arg("GPUPOOL_REPORT=1");
    if with == With::Preload {
        c.arg(format!("LD_PRELOAD={}", library()));
    }
    c.args(env.iter().map(|(k, v)| format!("{k}={v}")));
    c.arg(root().join("target/c").join(name)).args(args);
    let out = c.output().expect("make build makes target/c");
    Outcome {
        stdout: String::from_utf8_lossy(&out.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&out.stderr).into_owned(),
        code: out.status.code(),
    }
}

/// Runs it, and it must exit with 0. Tells what was skipped past the test runner.
fn run(with: With, name: &str, args: &[&str], env: &[(&str, &str)]) -> Outcome {
    let out = launch(with, name, args, env);
    let how = if with == With::Preload { "preloaded" } else { "bare" };
    assert_eq!(out.code, Some(0), "{how}: {name} {args:?} {env:?}\n{}\n{}", out.stdout, out.stderr);
    for line in out.stdout.lines().filter(|l| l.starts_with("skipped: ")) {
        let _ = std::io::stderr().write_all(format!("{how} {name} {args:?}: {line}\n").as_bytes());
    }
    out
}

/// A program of `tests/c/preload` that checks something: bare, where it shows that the program is right, and preloaded.
fn both(name: &str, args: &[&str], env: &[(&str, &str)]) -> Outcome {
    let name = format!("preload/{name}");
    // gpupool's settings say nothing to the bare driver.
    if !env.iter().any(|(key, _)| key.starts_with("GPUPOOL_")) {
        let bare = run(With::Bare, &name, args, env);
        assert!(bare.passed() > 0, "{name} {args:?} checked nothing:\n{}", bare.stdout);
    }
    let out = run(With::Preload, &name, args, env);
    assert!(out.passed() > 0, "{name} {args:?} checked nothing:\n{}", out.stdout);
    out
}

/// The settings under which order must be kept as well: other ways of freeing, other memory, older drivers.
const WAYS: &[&[(&str, &str)]] = &[
    &[],
    &[("GPUPOOL_FREE", "barrier")],
    &[("GPUPOOL_FREE", "sync")],
    &[("SIMCUDA_DRIVER", "12040")],
    &[("GPUPOOL_BACKING", "malloc")],
    &[("SIMCUDA_VMM", "0")],
    &[("SIMCUDA_DELAY_US", "300")],
];

#[test]
fn a_report_is_read() {
    let text = "gpupool: report of process 17, a program\n\
        gpupool: runtime door: served 1 mallocs 2 frees, foreign 3 mallocs 4 frees\n\
        gpupool: driver door: served 5 mallocs 6 frees, foreign 7 mallocs 8 frees\n\
        gpupool: gpupool door: served 9 mallocs 10 frees, foreign 0 mallocs 11 frees\n\
        gpupool: cnmem door: served 17 mallocs 18 frees, foreign 0 mallocs 0 frees\n\
        gpupool: pinned memory: served 12, from the cache 13\n\
        gpupool: device 0: 14 mallocs, 99.5 % from the cache, peak live 1 MiB, peak held 2 MiB, 15 fences, 16 waits\n";
    let report = Report::parse(text).expect("a report");
    assert_eq!(report.runtime, Door { mallocs: 1, frees: 2, foreign_mallocs: 3, foreign_frees: 4 });
    assert_eq!(report.driver, Door { mallocs: 5, frees: 6, foreign_mallocs: 7, foreign_frees: 8 });
    assert_eq!(report.gpupool, Door { mallocs: 9, frees: 10, foreign_mallocs: 0, foreign_frees: 11 });
    assert_eq!(report.cnmem, Door { mallocs: 17, frees: 18, ..Door::default() });
    assert_eq!((report.process, &*report.program), (17, "a program"));
    assert_eq!((report.pinned, report.devices), ((12, 13), vec![(14, 15, 16)]));
}

// ---- Finding the driver

/// N1, N2, N3: everybody else's look-ups.
#[test]
fn look_ups_that_are_not_the_drivers_are_left_alone() {
    let proxy = root().join("target/c/preload/libproxy.so").display().to_string();
    both("resolve", &["dlsym", &proxy], &[]);
}

/// N4, N5.
#[test]
fn the_drivers_own_look_ups_and_threads_are_left_alone() {
    for quirk in [&[("SIMCUDA_SELF_LOOKUP", "1")][..], &[("SIMCUDA_INIT_THREAD", "1")]] {
        assert!(both("dlopen_only", &["both"], quirk).report().served() >= 200);
        assert!(both("resolve", &["direct"], quirk).report().served() >= 100);
    }
}

/// N6, N8.
#[test]
fn names_versions_and_flags_lead_to_one_function_each() {
    for version in ["13000", "12040", "12000"] {
        let env = [("SIMCUDA_DRIVER", version)];
        both("resolve", &["chain"], &env);
        if version == "13000" {
            let out = both("resolve", &["table"], &env);
            assert!(out.passed() > 3000);
            for symbol in ["cuMemAlloc_v2", "cuMemFree_v2", "cuMemGetAddressRange_v2", "cuGetProcAddress_v2"] {
                assert!(out.stdout.contains(&format!("ours: {symbol}\n")), "{symbol} is not ours:\n{}", out.stdout);
            }
            // The 32-bit interface of CUDA 3.1 has nothing that a pool could serve.
            assert!(!out.stdout.contains("ours: cuMemAlloc\n"), "{}", out.stdout);
        }
    }
}

/// N7.
#[test]
fn a_driver_without_the_newer_resolver_serves_through_the_older() {
    let lacks = [("SIMCUDA_LACKS", "cuGetProcAddress_v2"), ("SIMCUDA_DRIVER", "11080")];
    assert!(both("resolve", &["v1"], &lacks).report().driver.mallocs >= 100);
}

/// N11.
#[test]
fn per_thread_default_streams_stay_per_thread() {
    both("resolve", &["streams"], &[]);
}

#[test]
fn every_way_to_the_driver_is_served() {
    for way in ["direct", "handle", "address", "entry"] {
        let driver = both("resolve", &[way], &[]).report().driver;
        assert!(driver.mallocs >= 100 && driver.frees >= 100, "{way}: {driver:?}");
    }
    assert!(both("dlopen_only", &["driver"], &[]).report().driver.mallocs >= 100);
    assert!(both("dlopen_only", &["runtime"], &[]).report().served() >= 100);
}

/// N9: nvcc's default. Nothing of the runtime can be replaced there, and all of it goes through the driver.
#[test]
fn the_static_runtime_is_served_at_the_driver_door() {
    let report = both("preload_static", &[], &[]).report();
    assert!(report.driver.mallocs >= 200 && report.driver.frees >= 200, "{report:?}");
    assert_eq!(report.runtime.mallocs, 0);
    assert_eq!(report.devices.iter().map(|d| d.0).sum::<u64>(), report.driver.mallocs);
}

/// N10: no CUDA at all, or none on this machine.
#[test]
fn programs_without_cuda_see_nothing() {
    let run = |program: &str, args: &[&str]| {
        let out = Command::new(program)
            .args(args)
            .env("LD_PRELOAD", library())
            .env_remove("LD_LIBRARY_PATH")
            // Each would be told of, and be reported on, where CUDA is used.
            .envs([("GPUPOOL_REPORT", "1"), ("GPUPOOL_MAXMEM", "1g"), ("GPUPOOL_SLACK", "much")])
            .output();
        match out {
            Err(_) => {
                let _ = std::io::stderr().write_all(format!("skipped: {program}: it is not here\n").as_bytes());
            }
            Ok(out) => {
                let text = format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
                assert_eq!(out.status.code(), Some(0), "{program} {args:?}\n{text}");
                assert!(!text.contains("gpupool:"), "{program} {args:?}\n{text}");
                assert!(out.stderr.is_empty(), "{program} {args:?}\n{text}");
            }
        }
    };
    run("/bin/true", &[]);
    run("bash", &["-c", "ls; echo $(ls | wc -l); exec true"]);
    run("bash", &["-c", "ls"]);
    run("python3", &["-c", "0"]);
    // A look-up that begins as CUDA's names do.
    run("python3", &["-c", "import ctypes; ctypes.CDLL(None).cuserid"]);
    run("git", &["--version"]);
    run("timeout", &["20", "sleep", "0"]);
    // The name of a driver that is not there: the loader's own answer.
    run(
        "python3",
        &[
            "-c",
            "import ctypes\ntry:\n ctypes.CDLL('libcuda.so.1').cuInit(0)\nexcept OSError as e:\n assert 'libcuda' in str(e), e",
        ],
    );
}

// ---- Answers

#[test]
fn answers_are_the_bare_drivers() {
    for env in [&[][..], &[("GPUPOOL_BACKING", "malloc")], &[("SIMCUDA_VMM", "0")], &[("SIMCUDA_DRIVER", "12040")]] {
        let report = both("errors", &[], env).report();
        assert!(report.served() > 100, "{report:?}");
    }
    both("errors", &[], &[("SIMCUDA_DEVICES", "1")]);
    both("errors", &[], &[("GPUPOOL_FREE", "sync")]);
}

/// E1.
#[test]
fn what_is_cached_goes_back_before_memory_is_short() {
    for env in [&[][..], &[("GPUPOOL_BACKING", "malloc")], &[("SIMCUDA_VMM", "0")], &[("GPUPOOL_FREE", "sync")]] {
        both("errors", &["oom"], &[env, &[("SIMCUDA_MEM", "64m")]].concat());
    }
}

// ---- Order

/// `GPUPOOL_ORDER_ROUNDS` for longer runs: minutes a mode with 100,000.
fn order(mode: &str, rounds: &str) {
    let longer = std::env::var("GPUPOOL_ORDER_ROUNDS");
    let rounds = longer.as_deref().unwrap_or(rounds);
    for env in WAYS {
        let report = both("order", &[mode, rounds], env).report();
        assert!(report.served() > 0 || mode == "pinned", "{mode} {env:?}: {report:?}");
    }
}

/// S2.
#[test]
fn a_late_write_never_reaches_the_next_owner() {
    order("streams", "2000");
}

#[test]
fn streams_destroyed_while_busy_keep_their_order() {
    order("destroy", "2000");
}

/// S4.
#[test]
fn memory_open_to_a_peer_is_finished_before_it_moves() {
    order("peer", "300");
}

#[test]
fn pinned_memory_is_finished_before_the_cpu_has_it() {
    order("pinned", "500");
    let env = [("GPUPOOL_PINNED", "0")];
    assert_eq!(run(With::Preload, "preload/order", &["pinned", "100"], &env).report().pinned.1, 0);
}

/// S1.
#[test]
fn per_thread_default_streams_keep_their_order() {
    order("threads", "400");
}

/// S3, S7.
#[test]
fn memory_is_trimmed_under_load() {
    order("trim", "300");
    for env in [&[][..], &[("GPUPOOL_BACKING", "malloc")], &[("SIMCUDA_DRIVER", "12040")], &[("SIMCUDA_VMM", "0")]] {
        both("order", &["limit", "800"], &[env, &[("SIMCUDA_MEM", "64m")]].concat());
    }
}

/// With little memory blocks move between streams at every step.
#[test]
fn order_holds_at_the_limit() {
    let env = [("SIMCUDA_MEM", "96m")];
    both("order", &["streams", "2000", "7"], &env);
    both("order", &["destroy", "2000", "8"], &env);
}

// ---- Hangs, results, captures

#[test]
fn nothing_hangs_that_does_not_hang_bare() {
    for env in WAYS {
        both("hang", &["waits"], env);
    }
    both("hang", &["waits"], &[("SIMCUDA_MEM", "96m")]);
}

#[test]
fn a_free_is_enough_before_results_are_read() {
    for env in WAYS {
        both("hang", &["results"], env);
    }
}

/// `capture: another global alloc=900 free=0 ... nodes=0`: what is 0 bare must be 0 preloaded, and the graph the same.
#[test]
fn captures_are_never_worse_than_bare() {
    let bare = run(With::Bare, "preload/hang", &["captures"], &[]);
    let lines = |out: &Outcome| -> Vec<Vec<String>> {
        let found = out.stdout.lines().filter(|l| l.starts_with("capture: "));
        found.map(|l| l.split(' ').map(str::to_string).collect()).collect()
    };
    for env in WAYS {
        let ours = run(With::Preload, "preload/hang", &["captures"], env);
        let (was, is) = (lines(&bare), lines(&ours));
        assert_eq!((was.len(), is.len()), (9, 9), "{}", ours.stdout);
        for (was, is) in was.iter().zip(&is) {
            assert_eq!(was[..3], is[..3]);
            let kept = was.contains(&"end=0".to_string());
            for (was, is) in was[3..].iter().zip(&is[3..]) {
                let same = was == is;
                let nodes = was.starts_with("nodes=");
                assert!(
                    same || (!nodes && !was.ends_with("=0")) || (nodes && !kept),
                    "{env:?}: {was} became {is}\n{}",
                    ours.stdout
                );
            }
        }
    }
}

// ---- Life

/// S8.
#[test]
fn contexts_end_with_live_blocks() {
    for env in [&[][..], &[("GPUPOOL_BACKING", "malloc")], &[("SIMCUDA_DRIVER", "12040")], &[("SIMCUDA_VMM", "0")]] {
        both("life", &["reset"], env);
        both("life", &["contexts"], env);
    }
}

#[test]
fn frees_at_exit_are_answered() {
    for mode in ["exit", "exit-busy"] {
        for with in [With::Bare, With::Preload] {
            let out = run(with, "preload/life", &[mode], &[]);
            for when in ["exit handler of before", "exit handler of after", "destructor"] {
                assert!(out.stdout.contains(when), "{mode}: no {when}\n{}", out.stdout);
            }
        }
    }
}

/// I3.
#[test]
fn children_of_a_fork_leave_the_parent_alone() {
    both("life", &["fork"], &[]);
    both("life", &["fork"], &[("GPUPOOL_BACKING", "malloc")]);
}

#[test]
fn threads_come_and_go() {
    assert!(both("life", &["threads"], &[]).report().served() > 1000);
}

#[test]
fn the_first_use_may_be_in_a_constructor() {
    let ctor = root().join("target/c/preload/libctor.so").display().to_string();
    assert!(both("life", &["library", &ctor], &[]).report().served() >= 13);
    // Preloaded before, and after, gpupool.
    for list in [format!("{}:{ctor}", library()), format!("{ctor}:{}", library())] {
        let out = run(With::Bare, "preload/life", &["preloaded"], &[("LD_PRELOAD", &list)]);
        assert!(out.passed() > 0 && out.report().served() >= 13, "{}\n{}", out.stdout, out.stderr);
    }
}

// ---- Sharing

/// I1, I2.
#[test]
fn a_child_reads_the_very_buffer_or_is_refused_at_once() {
    for args in ["both", "orphan", "crowd", "alone"] {
        both("ipc", &[args], &[]);
    }
    // Blocks of the driver's own have its own handles, parts of them none.
    for env in [[("GPUPOOL_BACKING", "malloc"), ("PARTS", "1")], [("SIMCUDA_VMM", "0"), ("PARTS", "1")]] {
        run(With::Preload, "preload/ipc", &["both"], &env);
        run(With::Preload, "preload/ipc", &["alone"], &env);
    }
    // Pages have no handle that a process without gpupool could open.
    let out = run(With::Preload, "preload/ipc", &["alone"], &[]);
    for line in out.stdout.lines().filter(|l| l.starts_with("child: ")) {
        assert!(line.contains("preloaded 0") && !line.contains("answers 0 "), "{}", out.stdout);
    }
    let out = run(With::Bare, "preload/ipc", &["reverse"], &[("CHILD_PRELOAD", &library())]);
    assert_eq!(out.stdout.matches("preloaded 1, open answers 0 ").count(), 5, "{}", out.stdout);
}

// ---- The other programs, and when the doors serve

#[test]
fn the_other_programs_run_preloaded() {
    for env in [&[][..], &[("GPUPOOL_BACKING", "malloc")], &[("GPUPOOL_FREE", "sync")]] {
        for (name, args) in [
            ("cnmem_contract", &[][..]),
            ("pool_contract", &[]),
            ("process", &["fork"]),
            ("process", &["exit"]),
            ("stress", &["8000"]),
            ("quickstart", &[]),
            ("static_runtime", &[]),
            ("caffe_train", &["2", "--iterations", "4"]),
            ("torch_swap", &[]),
        ] {
            run(With::Preload, name, args, env);
        }
    }
}

/// The facts are the bare driver's, and one of them is that cudaFree waits. The pool may place blocks elsewhere, and allocates where
/// the driver refuses.
#[test]
fn the_drivers_facts_hold_preloaded() {
    let out = launch(With::Preload, "driver_facts", &[], &[("GPUPOOL_FREE", "sync")]);
    assert!(matches!(out.code, Some(0..=1)), "{:?}\n{}\n{}", out.code, out.stdout, out.stderr);
    assert!(out.passed() > 50, "{}", out.stdout);
    let text = std::fs::read_to_string(root().join("tests/c/driver_facts.c")).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    for failed in out.stdout.lines().filter(|l| l.contains("driver_facts.c:")) {
        let number: usize = failed.split(':').nth(1).and_then(|n| n.parse().ok()).expect("a line number");
        let source = lines[number - 1];
        let placement = source.contains("q - p");
        // The captures' table: codes of allocation and free.
        let capture = source.contains("want") || source.contains("end");
        assert!(placement || capture, "{failed}\n{source}");
    }
}

#[test]
fn a_program_that_only_links_keeps_its_own_cudamalloc() {
    let out = run(With::Bare, "quickstart", &[], &[]);
    let report = out.report();
    assert_eq!((report.runtime, report.driver), (Door::default(), Door::default()), "{}", out.stderr);
}

/// Whose report it is, and every door that is called by name.
#[test]
fn the_report_names_the_process_and_counts_every_door() {
    let child = Command::new(root().join("target/c/quickstart"))
        .env("LD_LIBRARY_PATH", format!("{0}/target/simcuda:{0}/target/release", root().display()))
        .env("GPUPOOL_REPORT", "1")
        .stderr(std::process::Stdio::piped())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let id = child.id();
    let text = String::from_utf8(child.wait_with_output().unwrap().stderr).unwrap();
    let report = Report::parse(&text).unwrap_or_else(|| panic!("no report:\n{text}"));
    assert_eq!((report.process, &*report.program), (id, "quickstart"));
    let only = |mallocs, frees| Door { mallocs, frees, ..Door::default() };
    assert_eq!((report.cnmem, report.gpupool), (only(3, 3), only(0, 0)), "{text}");
    // torch_swap's storages come in by cutorch's slot, which is a way to the gpupool door.
    let report = run(With::Bare, "torch_swap", &[], &[]).report();
    assert!(report.gpupool.mallocs > 0 && report.gpupool.mallocs == report.gpupool.frees, "{report:?}");
    assert_eq!(report.cnmem, Door::default());
}

#[test]
fn the_setting_decides_whether_the_doors_serve() {
    // Off: preloaded, and yet not there. What goes through the doors, if they count it at all, is foreign.
    let out = run(With::Preload, "preload/preload_static", &[], &[("GPUPOOL_INTERPOSE", "0")]);
    if let Some(report) = Report::parse(&out.stderr) {
        assert_eq!((report.served(), report.runtime.frees + report.driver.frees), (0, 0), "{}", out.stderr);
    }
    let out = run(With::Preload, "preload/resolve", &["direct"], &[("GPUPOOL_INTERPOSE", "0")]);
    assert!(Report::parse(&out.stderr).is_none_or(|report| report.served() == 0), "{}", out.stderr);
    // On: caffe_train links the library, and its bare run calls cudaMalloc.
    let args = ["2", "--iterations", "4", "--mode", "cuda"];
    let linked = run(With::Bare, "caffe_train", &args, &[]);
    assert_eq!(linked.report().served(), 0, "{}", linked.stderr);
    let on = run(With::Bare, "caffe_train", &args, &[("GPUPOOL_INTERPOSE", "1")]);
    assert!(on.report().served() > 0, "{}", on.stderr);
}

/// One driver call after another fails: an error at most, neither a crash nor a hang.
#[test]
fn a_fault_at_any_driver_call_is_an_error_and_no_more() {
    for call in [
        "cuInit",
        "cuMemAddressReserve",
        "cuMemCreate",
        "cuMemMap",
        "cuMemSetAccess",
        "cuMemUnmap",
        "cuMemRelease",
        "cuCtxRecordEvent",
        "cuCtxWaitEvent",
        "cuEventCreate",
        "cuEventQuery",
        "cuEventSynchronize",
        "cuCtxGetId",
        "cuCtxGetCurrent",
        "cuMemGetInfo",
        "cuMemAlloc",
        "cuMemFree",
        "cuCtxSynchronize",
    ] {
        for rule in ["1:2", "2:999", "every:2:999"] {
            let fail = format!("{call}:{rule}");
            let out = launch(With::Preload, "preload/preload_static", &[], &[("SIMCUDA_FAIL", &fail)]);
            assert!(matches!(out.code, Some(0..=2)), "{fail}: {:?}\n{}\n{}", out.code, out.stdout, out.stderr);
        }
    }
}
