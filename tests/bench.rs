//! `make bench` prints every figure, and nothing else.

use std::path::Path;
use std::process::Command;

const FIGURES: [&str; 9] = [
    "hot_pair_ns",
    "malloc_glibc_pair_ns",
    "random_100_live_ns",
    "random_10000_live_ns",
    "threads_1_mpairs",
    "threads_2_mpairs",
    "host_bytes_per_device_mib",
    "w6_ratio",
    "w6_driver_calls_per_op",
];

#[test]
fn make_bench_prints_each_figure_on_a_line() {
    for args in ["", "--no-preload"] {
        let mut make = Command::new("make");
        make.current_dir(Path::new(env!("CARGO_MANIFEST_DIR"))).args([
            "--no-print-directory",
            "bench",
            &format!("BENCH_ARGS={args}"),
        ]);
        // `make test` runs this: its flags are not this make's.
        make.env_remove("MAKEFLAGS").env_remove("MFLAGS").env_remove("MAKELEVEL");
        let out = make.env("FIGURES_QUICK", "1").output().expect("make runs");
        let errors = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success(), "{errors}");
        let how = if args.is_empty() { "libgpupool.so preloaded" } else { "libgpupool.so opened, not preloaded" };
        assert!(errors.lines().any(|l| l.starts_with("figures: ") && l.ends_with(how)), "{errors}");
        let text = String::from_utf8_lossy(&out.stdout);
        let names: Vec<&str> = text.lines().filter_map(|l| l.split(' ').next()).collect();
        assert_eq!(names, FIGURES, "{errors}");
        for line in text.lines() {
            let fields: Vec<&str> = line.split(' ').collect();
            assert_eq!(fields.len(), 3, "not a name, a value and a unit: {line}");
            let value: f64 = fields[1].parse().unwrap_or_else(|_| panic!("not a number: {line}"));
            assert!(value > 0.0 && value.is_finite(), "{line}");
        }
    }
}
