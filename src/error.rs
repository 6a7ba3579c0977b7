//! What can go wrong, and the numbers that the doors answer with.

use std::fmt;

use crate::driver::CuError;

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Error {
    InvalidArgument,
    /// Not the start of a live block of ours: foreign, interior, or freed already.
    UnknownPointer,
    /// `asked` bytes could not be had; `detail` says what is held.
    OutOfMemory {
        asked: usize,
        detail: Option<Box<str>>,
    },
    Driver(CuError),
}

impl Error {
    /// The `cudaError_t` of the same meaning. The numbers of `CUresult` and `cudaError_t` agree since CUDA 10.1.
    pub fn cuda_error(&self) -> i32 {
        match self {
            Error::InvalidArgument | Error::UnknownPointer => 1,
            Error::OutOfMemory { .. } => 2,
            Error::Driver(CuError(code)) => *code as i32,
        }
    }
}

impl From<CuError> for Error {
    fn from(e: CuError) -> Error {
        if e == CuError::OUT_OF_MEMORY { Error::OutOfMemory { asked: 0, detail: None } } else { Error::Driver(e) }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::InvalidArgument => f.write_str("invalid argument"),
            Error::UnknownPointer => f.write_str("not the start of a live block"),
            Error::OutOfMemory { asked, detail } => {
                write!(f, "out of memory: {asked} bytes asked")?;
                detail.as_ref().map_or(Ok(()), |d| write!(f, "; {d}"))
            }
            Error::Driver(CuError(code)) => write!(f, "the driver answered {code}"),
        }
    }
}
