//! What the benchmarks share: the library through its C interface, the driver, and the workloads, drawn beforehand.
// Each benchmark is a crate of its own and uses a part of this.
#![allow(dead_code)]

use std::ffi::{CString, c_int, c_uint, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;

pub type Ptr = *mut c_void;
/// A stream handle. A number, so that threads can be given one.
pub type Stream = usize;

const MIB: f64 = 1048576.0;

/// Set in the processes that measure: they run as `child` has it.
const CHILD: &str = "GPUPOOL_BENCH_CHILD";

pub fn is_child() -> bool {
    std::env::var_os(CHILD).is_some()
}

/// `GPUPOOL_SO`, or what `make build` made.
pub fn library() -> PathBuf {
    let built = || Path::new(env!("CARGO_MANIFEST_DIR")).join("target/release/libgpupool.so");
    std::env::var_os("GPUPOOL_SO").map_or_else(built, PathBuf::from)
}

/// This program again, in a process that finds simcuda, with the library preloaded or not.
pub fn child(preload: bool) -> Command {
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("target");
    let mut paths: Vec<PathBuf> = std::env::var_os("LD_LIBRARY_PATH").iter().flat_map(std::env::split_paths).collect();
    paths.extend([target.join("simcuda-release"), target.join("simcuda")]);
    let mut command = Command::new(std::env::current_exe().expect("this program's path"));
    command.env(CHILD, "1").env("LD_LIBRARY_PATH", std::env::join_paths(paths).expect("no colon in a path"));
    if preload {
        command.env("LD_PRELOAD", library());
    } else {
        command.env_remove("LD_PRELOAD");
    }
    if std::env::var_os("SIMCUDA_MEM").is_none() {
        command.env("SIMCUDA_MEM", "4g");
    }
    command
}

fn open(name: &str, flags: c_int) -> Ptr {
    let text = CString::new(name).expect("no NUL inside");
    // SAFETY: `text` is a C string.
    let handle = unsafe { libc::dlopen(text.as_ptr(), flags) };
    if handle.is_null() {
        eprintln!("{name} cannot be opened; `make bench` builds what is needed");
        std::process::exit(2);
    }
    handle
}

/// # Safety
/// `F` is the type of the C function of that name.
unsafe fn symbol<F: Copy>(handle: Ptr, name: &str) -> F {
    let text = CString::new(name).expect("no NUL inside");
    // SAFETY: a handle of dlopen, or RTLD_DEFAULT, and a C string.
    let found = unsafe { libc::dlsym(handle, text.as_ptr()) };
    assert!(!found.is_null(), "there is no {name}");
    assert_eq!(size_of::<F>(), size_of::<Ptr>());
    // SAFETY: of a pointer's size; the caller vouches for the type.
    unsafe { std::mem::transmute_copy(&found) }
}

/// `gpupoolStats_t`.
#[repr(C)]
#[derive(Default)]
pub struct Stats {
    pub live: u64,
    pub peak_live: u64,
    pub held: u64,
    pub peak_held: u64,
    pub cached: u64,
    pub mallocs: u64,
    pub frees: u64,
    pub hits: u64,
    pub fences: u64,
    pub waits: u64,
}

#[derive(Clone, Copy)]
pub struct Pool {
    malloc: unsafe extern "C" fn(*mut Ptr, usize, Stream) -> c_int,
    free: unsafe extern "C" fn(Ptr, Stream) -> c_int,
    stats: unsafe extern "C" fn(*mut Stats) -> c_int,
    trim: unsafe extern "C" fn(usize) -> c_int,
}

impl Pool {
    pub fn open() -> Pool {
        let handle = open(&library().to_string_lossy(), libc::RTLD_NOW | libc::RTLD_LOCAL);
        // SAFETY: the signatures of include/gpupool.h.
        unsafe {
            Pool {
                malloc: symbol(handle, "gpupoolMalloc"),
                free: symbol(handle, "gpupoolFree"),
                stats: symbol(handle, "gpupoolGetStats"),
                trim: symbol(handle, "gpupoolTrim"),
            }
        }
    }

    #[inline]
    pub fn malloc(&self, size: usize, stream: Stream) -> Ptr {
        let mut p = std::ptr::null_mut();
        // SAFETY: `p` is writable; the streams of a benchmark live as long as its process.
        let code = unsafe { (self.malloc)(&mut p, size, stream) };
        assert_eq!(code, 0, "gpupoolMalloc of {size} bytes");
        p
    }

    #[inline]
    pub fn free(&self, p: Ptr, stream: Stream) {
        // SAFETY: as above.
        let code = unsafe { (self.free)(p, stream) };
        assert_eq!(code, 0, "gpupoolFree");
    }

    pub fn stats(&self) -> Stats {
        let mut stats = Stats::default();
        // SAFETY: `stats` is writable.
        assert_eq!(unsafe { (self.stats)(&mut stats) }, 0, "gpupoolGetStats");
        stats
    }

    pub fn trim(&self) {
        // SAFETY: needs nothing.
        assert_eq!(unsafe { (self.trim)(0) }, 0, "gpupoolTrim");
    }
}

/// The driver, with the primary context of device 0.
#[derive(Clone, Copy)]
pub struct Gpu {
    handle: Stream,
    context: usize,
    stream_create: unsafe extern "C" fn(*mut Stream, c_uint) -> c_int,
    mem_info: unsafe extern "C" fn(*mut usize, *mut usize) -> c_int,
    mem_alloc: unsafe extern "C" fn(*mut Ptr, usize) -> c_int,
    mem_free: unsafe extern "C" fn(Ptr) -> c_int,
}

impl Gpu {
    pub fn open() -> Gpu {
        let handle = open("libcuda.so.1", libc::RTLD_NOW | libc::RTLD_GLOBAL);
        // SAFETY: the signatures of cuda.h, handles and device pointers taken for pointers; what they write to is writable.
        unsafe {
            let init: unsafe extern "C" fn(c_uint) -> c_int = symbol(handle, "cuInit");
            let retain: unsafe extern "C" fn(*mut usize, c_int) -> c_int = symbol(handle, "cuDevicePrimaryCtxRetain");
            let mut context = 0;
            assert_eq!((init(0), retain(&mut context, 0)), (0, 0), "cuInit, cuDevicePrimaryCtxRetain");
            let gpu = Gpu {
                handle: handle as usize,
                context,
                stream_create: symbol(handle, "cuStreamCreate"),
                mem_info: symbol(handle, "cuMemGetInfo_v2"),
                mem_alloc: symbol(handle, "cuMemAlloc_v2"),
                mem_free: symbol(handle, "cuMemFree_v2"),
            };
            gpu.enter();
            gpu
        }
    }

    /// Makes the context current on the calling thread.
    pub fn enter(&self) {
        // SAFETY: the signature of cuda.h; the context is never released.
        unsafe {
            let set: unsafe extern "C" fn(usize) -> c_int = symbol(self.handle as Ptr, "cuCtxSetCurrent");
            assert_eq!(set(self.context), 0, "cuCtxSetCurrent");
        }
    }

    /// A new non-blocking stream.
    pub fn stream(&self) -> Stream {
        let mut stream = 0;
        // SAFETY: `stream` is writable.
        assert_eq!(unsafe { (self.stream_create)(&mut stream, 1) }, 0, "cuStreamCreate");
        stream
    }

    /// Free bytes of the device.
    pub fn free_bytes(&self) -> usize {
        let (mut free, mut total) = (0, 0);
        // SAFETY: both are writable.
        assert_eq!(unsafe { (self.mem_info)(&mut free, &mut total) }, 0, "cuMemGetInfo");
        free
    }

    pub fn malloc(&self, size: usize) -> Ptr {
        let mut p = std::ptr::null_mut();
        // SAFETY: `p` is writable.
        assert_eq!(unsafe { (self.mem_alloc)(&mut p, size) }, 0, "cuMemAlloc of {size} bytes");
        p
    }

    pub fn free(&self, p: Ptr) {
        // SAFETY: `p` came from `malloc`.
        assert_eq!(unsafe { (self.mem_free)(p) }, 0, "cuMemFree");
    }
}

/// `cudaMalloc` and `cudaFree` as a linked program gets them: the preloaded library's where there is one.
#[derive(Clone, Copy)]
pub struct Runtime {
    malloc: unsafe extern "C" fn(*mut Ptr, usize) -> c_int,
    free: unsafe extern "C" fn(Ptr) -> c_int,
}

impl Runtime {
    pub fn open() -> Runtime {
        open("libcudart.so.13", libc::RTLD_NOW | libc::RTLD_GLOBAL);
        // SAFETY: the signatures of cuda_runtime_api.h.
        unsafe {
            Runtime { malloc: symbol(libc::RTLD_DEFAULT, "cudaMalloc"), free: symbol(libc::RTLD_DEFAULT, "cudaFree") }
        }
    }

    pub fn pair(&self, size: usize) {
        let mut p = std::ptr::null_mut();
        // SAFETY: `p` is writable, and freed once.
        let codes = unsafe { ((self.malloc)(&mut p, size), (self.free)(p)) };
        assert_eq!(codes, (0, 0), "cudaMalloc, cudaFree");
    }
}

/// glibc's malloc and free. The compiler must not see through the pair.
#[inline]
pub fn glibc_pair(size: usize) {
    // SAFETY: freed once.
    unsafe { libc::free(std::hint::black_box(libc::malloc(std::hint::black_box(size)))) };
}

/// C++'s `std::mt19937_64`, so that the workloads are those of the peers' benchmark, number by number.
pub struct Random {
    state: [u64; 312],
    at: usize,
}

impl Random {
    pub fn new(seed: u64) -> Random {
        let mut state = [seed; 312];
        for i in 1..312 {
            let last = state[i - 1];
            state[i] = 6364136223846793005u64.wrapping_mul(last ^ (last >> 62)).wrapping_add(i as u64);
        }
        Random { state, at: 312 }
    }

    pub fn next(&mut self) -> u64 {
        if self.at == 312 {
            for i in 0..312 {
                let x = (self.state[i] & !0x7fff_ffff) | (self.state[(i + 1) % 312] & 0x7fff_ffff);
                let odd = if x & 1 == 1 { 0xb502_6f5a_a966_19e9 } else { 0 };
                self.state[i] = self.state[(i + 156) % 312] ^ (x >> 1) ^ odd;
            }
            self.at = 0;
        }
        let mut x = self.state[self.at];
        self.at += 1;
        x ^= (x >> 29) & 0x5555_5555_5555_5555;
        x ^= (x << 17) & 0x71d6_7fff_eda6_0000;
        x ^= (x << 37) & 0xfff7_eee0_0000_0000;
        x ^ (x >> 43)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// A size whose logarithm is spread evenly.
    pub fn size(&mut self, lo: f64, hi: f64) -> usize {
        let unit = self.next() as f64 / 2f64.powi(64);
        (lo.ln() + unit * (hi.ln() - lo.ln())).exp() as usize
    }
}

/// Random sizes over a live set: first `start`, then each step replaces one block.
pub struct Churn {
    pub start: Vec<usize>,
    pub steps: Vec<(usize, usize)>,
}

impl Churn {
    pub fn draw(live: usize, steps: usize) -> Churn {
        let (lo, hi) = (256.0, 524288.0);
        let mut random = Random::new(7);
        let start = (0..live).map(|_| random.size(lo, hi)).collect();
        let steps = (0..steps).map(|_| (random.below(live), random.size(lo, hi))).collect();
        Churn { start, steps }
    }
}

/// The sizes of one thread of the threads' workload: its live set, and what it goes through.
pub fn thread_sizes(thread: usize) -> ([usize; 32], [usize; 256]) {
    let mut random = Random::new(thread as u64);
    let mut size = || random.size(256.0, 65536.0);
    (std::array::from_fn(|_| size()), std::array::from_fn(|_| size()))
}

/// Runs `pairs` of a thread of the threads' workload.
pub fn thread_pairs(pool: &Pool, stream: Stream, pairs: u64, sizes: &[usize; 256], live: &mut [Ptr; 32]) {
    for i in 0..pairs as usize {
        let p = &mut live[i % 32];
        pool.free(*p, stream);
        *p = pool.malloc(sizes[(i * 7) & 255], stream);
    }
}

pub enum Op {
    /// Allocates, as the last of the live blocks.
    Malloc(usize),
    /// Frees the block at this place; the last one takes the place.
    Free(usize),
}

/// Fragmentation: phases of random sizes, up to `cap` bytes live.
pub struct Phases {
    pub ops: Vec<Op>,
    pub mallocs: usize,
    /// The most bytes that were ever asked for at a time.
    pub peak: usize,
}

impl Phases {
    /// The bounds of the sizes are made for 6 GiB and scaled with `cap`.
    pub fn draw(mallocs: usize, cap: usize) -> Phases {
        let scale = cap as f64 / (6.0 * 1024.0 * MIB);
        let mut random = Random::new(11);
        let (mut ops, mut live): (_, Vec<usize>) = (Vec::new(), Vec::new());
        let (mut bytes, mut peak) = (0, 0);
        for i in 0..mallocs {
            let hi = [64.0, 4.0, 512.0][(i / 2000) % 3] * MIB;
            let size = random.size(4096.0 * scale, hi * scale);
            while bytes + size > cap && !live.is_empty() {
                let at = random.below(live.len());
                bytes -= live.swap_remove(at);
                ops.push(Op::Free(at));
            }
            ops.push(Op::Malloc(size));
            live.push(size);
            bytes += size;
            peak = peak.max(bytes);
        }
        Phases { ops, mallocs, peak }
    }
}

/// This process's memory of its own, in bytes: device memory that simcuda makes up is shared, and not in it.
pub fn anonymous_bytes() -> u64 {
    let field = |file: &str, name: &str| -> Option<u64> {
        let text = std::fs::read_to_string(file).ok()?;
        let line = text.lines().find_map(|l| l.strip_prefix(name))?;
        line.split_whitespace().next()?.parse().ok()
    };
    // The first is exact; the second lags behind on many processors.
    let kib = field("/proc/self/smaps_rollup", "Anonymous:").or_else(|| field("/proc/self/status", "RssAnon:"));
    kib.expect("/proc/self/status") * 1024
}

pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
