//! CPU or CUDA: the configured choice, the available devices, and the reason for the one in use.

use std::path::Path;

use ort::ep::{CUDA, ExecutionProvider};
use ort::session::builder::SessionBuilder;

use crate::open_error::DeviceError;
use crate::options::DeviceChoice;

/// Device that a session runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    Cpu,
    Cuda,
}

/// A session builder for the selected device.
pub struct Chosen {
    /// Ready to load a model.
    pub builder: SessionBuilder,
    /// Device that it will run on.
    pub device: Device,
    /// The selected device and the reason, in one line for the log.
    pub note: String,
}

/// Configures the builder for the requested device.
pub fn choose(builder: SessionBuilder, choice: DeviceChoice, library: &Path) -> Result<Chosen, DeviceError> {
    match choice {
        DeviceChoice::Cpu => {
            Ok(Chosen { builder, device: Device::Cpu, note: "cpu, as configured".to_owned() })
        }
        DeviceChoice::Cuda => match with_cuda(builder, library) {
            Ok(builder) => {
                Ok(Chosen { builder, device: Device::Cuda, note: "cuda, as configured".to_owned() })
            }
            Err(refused) => Err(refused.0),
        },
        DeviceChoice::Auto => Ok(match with_cuda(builder, library) {
            Ok(builder) => {
                Chosen { builder, device: Device::Cuda, note: "cuda, which is available".to_owned() }
            }
            Err(refused) => {
                let (error, builder) = *refused;
                Chosen { builder, device: Device::Cpu, note: format!("cpu, since {error}") }
            }
        }),
    }
}

/// The builder with CUDA, or the reason and the unchanged builder.
type WithCuda = Result<SessionBuilder, Box<(DeviceError, SessionBuilder)>>;

fn with_cuda(builder: SessionBuilder, library: &Path) -> WithCuda {
    if !CUDA::is_available().unwrap_or(false) {
        return Err(Box::new((DeviceError::NotBuiltIn(library.display().to_string()), builder)));
    }
    // TF32 has ten bits of a product's factors: the choices of a model in 32 bits would not be
    // those of the CPU, nor the same for one token and for several.
    let cuda = CUDA::default().with_tf32(false).build().error_on_failure();
    builder.with_execution_providers([cuda]).map_err(|error| {
        let reason = error.to_string();
        Box::new((DeviceError::NotStarted(reason), error.recover()))
    })
}
