//! Every C program of `tests/c` and `c_examples`, on simcuda. `make` builds them.

use std::ffi::OsStr;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::process::Command;

/// Runs target/c/`name`; it must exit with `code`. Returns what it printed, and shows its closing line, and what it skipped, past
/// the test runner, which keeps what a passing test prints to itself.
fn program(name: &str, args: &[&str], env: &[(&str, &str)], code: i32) -> String {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let libraries = format!("{0}/target/simcuda:{0}/target/release", root.display());
    let mut c = Command::new("timeout");
    c.arg("120").arg(root.join("target/c").join(name)).args(args).env("LD_LIBRARY_PATH", libraries);
    c.envs(env.iter().copied());
    let out = c.output().expect("make build makes target/c");
    let text = format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert_eq!(out.status.code(), Some(code), "{name} {args:?} {env:?}\n{text}");
    let settings: String = env.iter().map(|(k, v)| format!("{k}={v} ")).collect();
    let closing = text.lines().last().unwrap_or("(prints nothing)");
    let skipped: String = text.lines().filter(|l| l.starts_with("skipped: ")).map(|l| format!("; {l}")).collect();
    let line = format!("C program {settings}{}: {closing}{skipped}\n", [&[name], args].concat().join(" "));
    let _ = std::io::stderr().write_all(line.as_bytes());
    text
}

/// Runs quickstart as `set` has it: what it wrote to standard error, and its exit code.
fn quickstart(set: impl FnOnce(&mut Command) -> &mut Command) -> (String, Option<i32>) {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let libraries = format!("{0}/target/simcuda:{0}/target/release", root.display());
    let mut c = Command::new("timeout");
    c.arg("60").arg(root.join("target/c/quickstart")).env("LD_LIBRARY_PATH", libraries);
    let out = set(&mut c).output().expect("make build makes target/c");
    (String::from_utf8_lossy(&out.stderr).into_owned(), out.status.code())
}

/// A program that ends in `N passed, N failed`: it must have checked something.
fn checks(name: &str, env: &[(&str, &str)]) {
    let text = program(name, &[], env, 0);
    assert!(passed(&text) > 50, "{name} checked too little:\n{text}");
}

/// The number in a closing `N passed, ...`.
fn passed(text: &str) -> u32 {
    text.lines().last().and_then(|l| l.split(' ').next()).and_then(|n| n.parse().ok()).unwrap_or(0)
}

#[test]
fn the_driver_answers_as_a_real_one() {
    checks("driver_facts", &[]);
}

#[test]
fn the_cnmem_door_keeps_its_contract() {
    checks("cnmem_contract", &[]);
    checks("cnmem_contract", &[("SIMCUDA_DEVICES", "1")]);
    checks("cnmem_contract", &[("SIMCUDA_VMM", "0")]);
    checks("cnmem_contract", &[("GPUPOOL_BACKING", "malloc")]);
    checks("cnmem_contract", &[("SIMCUDA_DRIVER", "12040")]);
}

#[test]
fn the_gpupool_door_keeps_its_contract() {
    checks("pool_contract", &[]);
    checks("pool_contract", &[("SIMCUDA_VMM", "0")]);
    checks("pool_contract", &[("GPUPOOL_BACKING", "malloc")]);
    checks("pool_contract", &[("SIMCUDA_DRIVER", "12040")]);
    checks("pool_contract", &[("GPUPOOL_BIN_GROWTH", "8"), ("GPUPOOL_BIN_STEPS", "1"), ("GPUPOOL_BIN_MAX", "2m")]);
    checks("pool_contract", &[("GPUPOOL_MAX_CACHED", "0")]);
}

/// Random operations through both doors at once. Its checks are few; each stands for all operations of a thread.
#[test]
fn random_operations_through_both_doors_keep_every_byte() {
    for env in [&[][..], &[("SIMCUDA_VMM", "0")], &[("SIMCUDA_DRIVER", "12040")], &[("SIMCUDA_MEM", "192m")]] {
        let text = program("stress", &["20000"], env, 0);
        assert!(passed(&text) > 10, "stress checked too little:\n{text}");
    }
    program("stress", &["none"], &[], 2);
}

#[test]
fn quickstart_runs_with_the_shared_and_the_static_runtime() {
    assert!(program("quickstart", &[], &[], 0).contains("bytes free"));
    assert!(program("static_runtime", &[], &[], 0).contains("bytes free"));
    program("quickstart", &["--help"], &[], 0);
    program("quickstart", &[], &[("SIMCUDA_DEVICES", "0")], 1);
}

#[test]
fn caffe_train_prints_both_runs_and_their_ratio() {
    let text = program("caffe_train", &["2", "--iterations", "4"], &[], 0);
    for part in ["bare cudaMalloc", "gpupool (cnmem)", "speed-up:", "simulated"] {
        assert!(text.contains(part), "{part} is missing:\n{text}");
    }
    assert!(
        program("caffe_train", &["2", "--iterations", "2", "--mode", "pool", "--grow"], &[], 0).contains("gpupool")
    );
    program("caffe_train", &["--help"], &[], 0);
    program("caffe_train", &["0"], &[], 2);
}

#[test]
fn torch_swap_frees_every_storage_where_it_came_from() {
    assert!(program("torch_swap", &[], &[], 0).contains("every storage went back"));
    program("torch_swap", &["/nowhere/libgpupool.so"], &[], 1);
}

#[test]
fn a_bad_or_misspelt_setting_warns_once_and_nothing_else_is_printed() {
    let quiet = program("quickstart", &[], &[], 0);
    assert!(!quiet.contains("gpupool:"), "{quiet}");
    let text = program("quickstart", &[], &[("GPUPOOL_BIN_STEPS", "many")], 0);
    assert_eq!(text.matches("GPUPOOL_BIN_STEPS=many").count(), 1, "{text}");
    let text = program("quickstart", &[], &[("GPUPOOL_BINSTEPS", "4"), ("GPUPOOL_HOME", "x")], 0);
    assert_eq!(text.matches("is GPUPOOL_BIN_STEPS meant?").count(), 1, "a misspelt name: {text}");
    assert!(!text.contains("GPUPOOL_HOME"), "not the library's, nor near to what is: {text}");
    let (out, _) = quickstart(|c| c.env("GPUPOOL_BIN_STEPS", OsStr::from_bytes(b"\xff")));
    assert_eq!(out.matches("GPUPOOL_BIN_STEPS=").count(), 1, "not UTF-8: {out}");
}

/// A machine without a driver: an answer, and one line for who asks.
#[test]
fn a_missing_driver_is_told_to_who_asks() {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    // The runtime stands beside the driver: a folder that has it alone.
    let alone = root.join(format!("target/no-driver-{}", std::process::id()));
    std::fs::create_dir_all(&alone).unwrap();
    for name in ["libcudart.so", "libcudart.so.12", "libcudart.so.13"] {
        let _ = std::os::unix::fs::symlink(root.join("target/simcuda").join(name), alone.join(name));
    }
    let libraries = format!("{}:{}/target/release", alone.display(), root.display());
    let run = |level| {
        let text = program("process", &["none"], &[("LD_LIBRARY_PATH", &libraries), ("GPUPOOL_LOG", level)], 0);
        text.matches("libcuda.so.1 cannot be loaded").count()
    };
    let told = (run("off"), run("info"));
    std::fs::remove_dir_all(&alone).unwrap();
    assert_eq!(told, (0, 1));
}

#[test]
fn a_forked_child_gets_answers_and_leaves_the_parent_alone() {
    program("process", &["fork"], &[], 0);
    program("process", &["fork"], &[("GPUPOOL_BACKING", "malloc")], 0);
}

#[test]
fn a_free_at_exit_calls_no_driver() {
    assert!(program("process", &["exit"], &[], 0).contains("free at exit: 4"));
}

/// A bad setting, and nowhere to say so: the program gets its memory all the same.
#[test]
fn a_warning_that_cannot_be_written_costs_nothing() {
    let full = std::fs::File::create("/dev/full").unwrap();
    let (_, code) = quickstart(|c| c.env("GPUPOOL_BIN_STEPS", "many").stderr(full));
    assert_eq!(code, Some(0));
}

#[test]
fn init_shrinks_only_when_asked_to() {
    let refused = ("SIMCUDA_FAIL", "cuMemCreate:1");
    program("quickstart", &[], &[refused], 1);
    let text = program("quickstart", &[], &[refused, ("GPUPOOL_INIT_SHRINK", "0.75"), ("GPUPOOL_LOG", "info")], 0);
    assert!(text.contains("trying 50331648 bytes"), "{text}");
}

/// One driver call after another fails; the program may report an error, but must neither crash nor hang.
#[test]
fn a_fault_at_any_driver_call_is_an_error_and_no_more() {
    for call in [
        "cuInit",
        "cuDevicePrimaryCtxRetain",
        "cuMemAddressReserve",
        "cuMemCreate",
        "cuMemMap",
        "cuMemSetAccess",
        "cuMemUnmap",
        "cuMemRelease",
        "cuStreamGetId",
        "cuCtxRecordEvent",
        "cuEventCreate",
        "cuEventQuery",
        "cuEventSynchronize",
        "cuStreamIsCapturing",
        "cuCtxGetId",
        "cuStreamGetCtx",
        "cuMemGetInfo",
        "cuThreadExchangeStreamCaptureMode",
        "cuMemGetAllocationGranularity",
        "cuCtxSynchronize",
    ] {
        for nth in 1..=2 {
            for code in ["2", "999"] {
                let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
                let libraries = format!("{0}/target/simcuda:{0}/target/release", root.display());
                for name in ["quickstart", "torch_swap"] {
                    let mut c = Command::new("timeout");
                    c.arg("60").arg(root.join("target/c").join(name)).env("LD_LIBRARY_PATH", &libraries);
                    let out = c.env("SIMCUDA_FAIL", format!("{call}:{nth}:{code}")).output().unwrap();
                    let status = out.status.code();
                    assert!(
                        matches!(status, Some(0..=1)),
                        "{name} with {call}:{nth}:{code} ended with {:?}",
                        out.status
                    );
                }
            }
        }
    }
}
