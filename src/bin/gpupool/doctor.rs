//! `gpupool doctor`: what is here, what it offers, and whether a program would be reached.

use std::ffi::{CStr, OsString, c_char, c_int, c_void};
use std::fmt::Display;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use crate::{program, settings};

/// Say whether the pool works here, and whether it would reach a program
///
/// Tells where the library and the CUDA driver are, what each device offers, and which settings the environment
/// has: a value that is not taken, or a name that is nearly a setting's. For a program: whether its
/// CUDA calls would be reached under `gpupool run`, and by which door: `runtime` (calls of a shared
/// libcudart.so) or `driver` (all others). The program is not run and no device memory is taken; the
/// program's shared libraries are listed by its own loader, as ldd does.
#[derive(clap::Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
What cannot be seen from outside: a program that loads CUDA with RTLD_DEEPBIND or dlmopen, or asks dlvsym
for its functions, goes past every preloaded library. `gpupool run --report` shows what was served.

Exit codes: 0 when all is well: the library is there, a driver starts, every setting is taken, and the
program, where one is named, would be reached as far as can be told; 1 when not; 2 when an argument is wrong."
)]
pub struct Options {
    /// The program to look at, by its path or by name on the PATH
    #[arg(value_name = "PROGRAM")]
    program: Option<OsString>,
}

pub fn doctor(options: Options) -> ExitCode {
    let library = crate::library();
    match &library {
        Ok(path) => say("library", path.display()),
        Err(why) => say("library", why),
    }
    let (taken, served) = settings();
    // All of it is looked at, whatever is wrong before.
    let mut well = library.is_ok() & taken & driver();
    if let Some(name) = options.program {
        let (path, verdict) = match program::find(&name) {
            Some(path) => (path.display().to_string(), program::verdict(&path)),
            None => (name.to_string_lossy().into_owned(), Err("not found".into())),
        };
        well &= verdict.is_ok() && served;
        let (Ok(text) | Err(text)) = verdict;
        say("program", format_args!("{path}: {text}"));
    }
    if well { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Tells of the settings in the environment. Whether all of them are taken, and whether they let CUDA's own calls be served.
fn settings() -> (bool, bool) {
    let variables = settings::environment();
    let (config, refused) = settings::parse(&variables);
    let misspelt = settings::misspelt(&variables);
    for (name, value) in variables.iter().filter(|(_, value)| !value.is_empty()) {
        if settings::SETTINGS.iter().any(|s| s.name == name) && settings::check(name, value).is_ok() {
            say("setting", format_args!("{name}={value}"));
        }
    }
    refused.iter().chain(&misspelt).for_each(|line| say("setting", line));
    for other in settings::unknown(&variables).iter().filter(|u| u.nearest.is_none()) {
        say("note", format_args!("{} is no setting of the library", other.name));
    }
    let served = config.interpose != Some(false);
    if !served {
        say("note", "GPUPOOL_INTERPOSE=0 is set: no program is reached");
    }
    (refused.is_empty() && misspelt.is_empty(), served)
}

/// One line. A reader that has gone away (`| head`) is no error.
fn say(what: &str, line: impl Display) {
    let _ = writeln!(std::io::stdout(), "{:<9} {line}", format!("{what}:"));
}

/// Calls a function of the driver and gives its result. The driver's own code for "not found" stands for a missing function.
macro_rules! cu {
    ($lib:expr, $name:literal $(, $arg:expr => $t:ty)*) => {{
        // SAFETY: an open library and a NUL-terminated name.
        let f = unsafe { libc::dlsym($lib, $name.as_ptr()) };
        if f.is_null() {
            500
        } else {
            // SAFETY: the driver's function of that name takes these arguments; the pointers are to live variables.
            unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($t),*) -> u32>(f)($($arg),*) }
        }
    }};
}

/// Tells of the driver and its devices. False when there is none that works.
fn driver() -> bool {
    // SAFETY: loads the driver as every CUDA program does; it is never closed.
    let lib = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if lib.is_null() {
        // SAFETY: a dlopen has just failed, so there is a message; no other thread is there to replace it.
        let why = unsafe { CStr::from_ptr(libc::dlerror()) };
        say("driver", format_args!("no CUDA driver here ({})", why.to_string_lossy()));
        return false;
    }
    let mut version: c_int = 0;
    let code = cu!(lib, c"cuDriverGetVersion", &mut version => *mut c_int);
    let place = place(lib);
    if code != 0 {
        say("driver", format_args!("{place}: does not tell its version: {}", error(lib, code)));
        return false;
    }
    say("driver", format_args!("CUDA {}.{}, {place}", version / 1000, version % 1000 / 10));
    let mut count: c_int = 0;
    let code = match cu!(lib, c"cuInit", 0 => u32) {
        0 => cu!(lib, c"cuDeviceGetCount", &mut count => *mut c_int),
        code => code,
    };
    if code != 0 {
        say("driver", format_args!("does not start: {}", error(lib, code)));
        return false;
    }
    if count == 0 {
        say("driver", "has no device");
    }
    // Each is looked at, whatever the one before answers.
    let devices = (0..count).map(|ordinal| device(lib, ordinal)).fold(count > 0, |all, well| all & well);
    // What order on the device takes: both calls came with CUDA 12.5.
    // SAFETY: an open library and NUL-terminated names.
    let has = |name: &CStr| !unsafe { libc::dlsym(lib, name.as_ptr()) }.is_null();
    let order = version >= 12050 && has(c"cuCtxRecordEvent") && has(c"cuCtxWaitEvent");
    say(
        "frees",
        if order {
            "ordered on the device: GPUPOOL_FREE=order works"
        } else {
            "by a wait of the host: GPUPOOL_FREE=sync is what this driver gets (order needs CUDA 12.5)"
        },
    );
    devices
}

/// False when the device does not answer.
fn device(lib: *mut c_void, ordinal: c_int) -> bool {
    let what = format!("device {ordinal}");
    let mut id: c_int = 0;
    let mut name = [0 as c_char; 128];
    let mut bytes = 0usize;
    let len = name.len() as c_int - 1;
    let codes = [
        cu!(lib, c"cuDeviceGet", &mut id => *mut c_int, ordinal => c_int),
        cu!(lib, c"cuDeviceGetName", name.as_mut_ptr() => *mut c_char, len => c_int, id => c_int),
        cu!(lib, c"cuDeviceTotalMem_v2", &mut bytes => *mut usize, id => c_int),
    ];
    if let Some(&code) = codes.iter().find(|code| **code != 0) {
        say(&what, error(lib, code));
        return false;
    }
    // SAFETY: the last byte of `name` was never written: it is a C string.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy();
    let has = |attribute: c_int| {
        let mut value: c_int = 0;
        let code = cu!(lib, c"cuDeviceGetAttribute", &mut value => *mut c_int, attribute => c_int, id => c_int);
        if code == 0 && value != 0 { "yes" } else { "no" }
    };
    // CU_DEVICE_ATTRIBUTE_: VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
    // GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED.
    let (vmm, fd, rdma) = (has(102), has(103), has(110));
    say(&what, format_args!("{name}, {} MiB; VMM {vmm}, shareable by descriptor {fd}, RDMA {rdma}", bytes >> 20));
    true
}

/// The file that the driver was loaded from.
fn place(lib: *mut c_void) -> String {
    // SAFETY: an open library, a NUL-terminated name; all-zero is a value of Dl_info, and dladdr fills it or answers 0.
    let file = unsafe {
        let mut info: libc::Dl_info = std::mem::zeroed();
        let found = libc::dladdr(libc::dlsym(lib, c"cuInit".as_ptr()), &mut info) != 0 && !info.dli_fname.is_null();
        found.then(|| CStr::from_ptr(info.dli_fname).to_string_lossy().into_owned())
    };
    let file = file.unwrap_or_else(|| "libcuda.so.1".into());
    // The real file's name has the driver's own version in it.
    Path::new(&file).canonicalize().map_or(file, |real| real.display().to_string())
}

/// `100 (CUDA_ERROR_NO_DEVICE)`.
fn error(lib: *mut c_void, code: u32) -> String {
    let mut name: *const c_char = std::ptr::null();
    if cu!(lib, c"cuGetErrorName", code => u32, &mut name => *mut *const c_char) != 0 || name.is_null() {
        return format!("error {code}");
    }
    // SAFETY: the driver's names are C strings that live as long as it does.
    format!("error {code} ({})", unsafe { CStr::from_ptr(name) }.to_string_lossy())
}
