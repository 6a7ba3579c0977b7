//! `make bench`: the library's figures on simcuda, one line each: name, value, unit. Nothing else goes to standard output.
//!
//! Each part runs in a process of its own, with the library preloaded: there it sees streams die, and needs no driver call
//! to tell one stream from another. `--no-preload` only opens it. `FIGURES_QUICK=1` runs a short version, to see that it works.

mod common;

use std::hint::black_box;
use std::process::Stdio;
use std::sync::Barrier;
use std::time::Instant;

use common::{
    Churn, Gpu, Op, Phases, Pool, Ptr, anonymous_bytes, child, glibc_pair, median, thread_pairs, thread_sizes,
};

const MIB: f64 = 1048576.0;

/// `full`, or `short` in a quick run.
fn times(full: usize, short: usize) -> usize {
    if std::env::var_os("FIGURES_QUICK").is_some_and(|v| v != "0") { short } else { full }
}

fn repetitions() -> usize {
    times(7, 3)
}

fn nanoseconds(run: impl FnOnce()) -> f64 {
    let start = Instant::now();
    run();
    start.elapsed().as_nanos() as f64
}

/// The hot pair, and glibc's beside it: turn by turn, so that both see the same machine.
fn pairs(pool: &Pool, gpu: &Gpu) {
    let (stream, n) = (gpu.stream(), 20_000);
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..times(101, 5) {
        let pair = || pool.free(black_box(pool.malloc(black_box(512), stream)), stream);
        (0..100).for_each(|_| pair());
        ours.push(nanoseconds(|| (0..n).for_each(|_| pair())) / n as f64);
        (0..100).for_each(|_| glibc_pair(512));
        theirs.push(nanoseconds(|| (0..n).for_each(|_| glibc_pair(512))) / n as f64);
    }
    println!("hot_pair_ns {}", median(ours));
    println!("malloc_glibc_pair_ns {}", median(theirs));
}

/// W2: random sizes, `live` blocks.
fn random(pool: &Pool, gpu: &Gpu, live: usize) {
    let (stream, n) = (gpu.stream(), times(200_000, 10_000));
    let churn = Churn::draw(live, n / 4 + repetitions() * n);
    let mut blocks: Vec<Ptr> = churn.start.iter().map(|&size| pool.malloc(size, stream)).collect();
    let mut step = |steps: &[(usize, usize)]| {
        for &(at, size) in steps {
            pool.free(blocks[at], stream);
            blocks[at] = pool.malloc(size, stream);
        }
    };
    let (warm, rest) = churn.steps.split_at(n / 4);
    step(warm);
    let values = rest.chunks(n).map(|steps| nanoseconds(|| step(steps)) / n as f64).collect();
    println!("random_{live}_live_ns {}", median(values));
    blocks.into_iter().for_each(|p| pool.free(p, stream));
}

/// W4: threads with a stream each, small live sets.
fn threads(pool: &Pool, gpu: &Gpu, count: usize) {
    let n = times(400_000, 10_000);
    let streams: Vec<_> = (0..count).map(|_| gpu.stream()).collect();
    let once = || {
        let (go, done) = (Barrier::new(count + 1), Barrier::new(count + 1));
        std::thread::scope(|scope| {
            for (i, &stream) in streams.iter().enumerate() {
                let (go, done) = (&go, &done);
                scope.spawn(move || {
                    gpu.enter();
                    let (start, sizes) = thread_sizes(i);
                    let mut live = start.map(|size| pool.malloc(size, stream));
                    go.wait();
                    thread_pairs(pool, stream, n as u64, &sizes, &mut live);
                    done.wait();
                    live.into_iter().for_each(|p| pool.free(p, stream));
                });
            }
            go.wait();
            let taken = nanoseconds(|| {
                done.wait();
            });
            (n * count) as f64 * 1e3 / taken
        })
    };
    once();
    println!("threads_{count}_mpairs {}", median((0..repetitions()).map(|_| once()).collect()));
}

/// Bytes live in W6. On a GPU 6 GiB; a twelfth here, and so are the sizes. `FIGURES_W6_MIB` sets it.
fn w6_cap() -> usize {
    let mib = std::env::var("FIGURES_W6_MIB").map_or(512, |text| text.parse().expect("FIGURES_W6_MIB is a number"));
    mib << 20
}

/// W6: the most device memory taken over the most that was live; host memory that grew meanwhile.
fn fragmentation(pool: &Pool, gpu: &Gpu) {
    let (stream, before) = (gpu.stream(), gpu.free_bytes());
    let phases = Phases::draw(times(30_000, 3_000), w6_cap());
    let trace = std::env::var("SIMCUDA_TRACE").ok();
    let calls =
        || trace.as_ref().map_or(0, |file| std::fs::read_to_string(file).map_or(0, |text| text.lines().count()));
    // Written to once, so that its pages are there already.
    let mut live: Vec<Ptr> = vec![1 as Ptr; phases.mallocs];
    live.clear();
    let (calls_before, host_before) = (calls(), anonymous_bytes());
    let (mut device, mut host, mut looks, mut looking) = (0, 0, 0, 0.0);
    let mut look = || {
        looks += 1;
        looking += nanoseconds(|| {
            // The driver's word, or the pool's own, whichever is more: a preloaded library may answer for the driver.
            device = device.max(before - gpu.free_bytes()).max(pool.stats().held as usize);
            host = host.max(anonymous_bytes());
        });
    };
    let mut mallocs = 0;
    let taken = nanoseconds(|| {
        for op in &phases.ops {
            match *op {
                Op::Malloc(size) => {
                    live.push(pool.malloc(size, stream));
                    mallocs += 1;
                    if mallocs % 500 == 0 {
                        look();
                    }
                }
                Op::Free(at) => pool.free(live.swap_remove(at), stream),
            }
        }
    });
    look();
    // One driver call of each look is ours.
    let calls = (calls() - calls_before).saturating_sub(looks);
    // What simcuda notes of the pool's memory is in it too: an upper bound.
    println!("host_bytes_per_device_mib {}", (host - host_before) as f64 / (device as f64 / MIB));
    println!("w6_ratio {}", device as f64 / phases.peak as f64);
    println!("w6_driver_calls_per_op {}", calls as f64 / mallocs as f64);
    println!("w6_us_per_op {}", (taken - looking) / 1e3 / mallocs as f64);
}

/// Runs a part in a process of its own: the values that it prints.
fn part(name: &str, preload: bool, trace: Option<&str>) -> Vec<(String, f64)> {
    let mut command = child(preload);
    command.args(["--part", name]).stdout(Stdio::piped()).stdin(Stdio::null());
    if name == "w6" && std::env::var_os("SIMCUDA_MEM").is_none() {
        command.env("SIMCUDA_MEM", (8 * w6_cap()).to_string());
    }
    match trace {
        Some(file) => command.env("SIMCUDA_TRACE", file),
        None => command.env_remove("SIMCUDA_TRACE"),
    };
    let out = command.spawn().and_then(|c| c.wait_with_output()).expect("this program runs again");
    if !out.status.success() {
        eprintln!("the part {name} failed: {}", out.status);
        std::process::exit(1);
    }
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    let value = |line: &str| {
        let (name, value) = line.split_once(' ').expect("a name and a value");
        (name.to_string(), value.parse().expect("a number"))
    };
    text.lines().map(value).collect()
}

fn get(values: &[(String, f64)], name: &str) -> f64 {
    values.iter().find(|(n, _)| n == name).unwrap_or_else(|| panic!("no {name}")).1
}

fn main() {
    let args: Vec<String> = std::env::args().collect();
    if common::is_child() {
        let (gpu, pool) = (Gpu::open(), Pool::open());
        return match args.last().map(String::as_str) {
            Some("pairs") => {
                pairs(&pool, &gpu);
                random(&pool, &gpu, 100);
                random(&pool, &gpu, 10_000);
                threads(&pool, &gpu, 1);
                threads(&pool, &gpu, 2);
            }
            _ => fragmentation(&pool, &gpu),
        };
    }
    let preload = !args.iter().any(|a| a == "--no-preload");
    eprintln!(
        "figures: {} {}",
        common::library().display(),
        if preload { "preloaded" } else { "opened, not preloaded" }
    );
    for (name, value) in part("pairs", preload, None) {
        let unit = if name.ends_with("_ns") { "ns" } else { "Mpairs/s" };
        println!("{name} {value:.3} {unit}");
    }
    let w6 = part("w6", preload, None);
    let file = std::env::temp_dir().join(format!("gpupool-figures-{}", std::process::id()));
    let traced = part("w6", preload, file.to_str());
    let _ = std::fs::remove_file(&file);
    println!("host_bytes_per_device_mib {:.3} B/MiB", get(&w6, "host_bytes_per_device_mib"));
    println!("w6_ratio {:.3} ratio", get(&w6, "w6_ratio"));
    println!("w6_driver_calls_per_op {:.4} calls", get(&traced, "w6_driver_calls_per_op"));
    eprintln!("figures: W6 took {:.2} us an operation, with simcuda's costs", get(&w6, "w6_us_per_op"));
}
