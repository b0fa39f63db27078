//! CPU or CUDA: the configured choice, the available devices, and the reason for the one in use.

use std::path::Path;

use ort::ep::{CUDA, ExecutionProvider};
use ort::session::builder::SessionBuilder;

use crate::config::process;

/// The device that the operator has configured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// CUDA where it works, else the CPU.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// CUDA, or an error.
    Cuda,
}

impl From<process::Device> for DeviceChoice {
    fn from(device: process::Device) -> Self {
        match device {
            process::Device::Auto => Self::Auto,
            process::Device::Cpu => Self::Cpu,
            process::Device::Cuda => Self::Cuda,
        }
    }
}

/// Device that a session runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// The CPU.
    Cpu,
    /// The first CUDA device.
    Cuda,
}

/// CUDA was configured and is not available.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// This ONNX Runtime was built without CUDA.
    #[error("{0} is built without CUDA: point ORT_DYLIB_PATH at the library of onnxruntime-gpu")]
    NotBuiltIn(String),
    /// ONNX Runtime was built with CUDA, but CUDA cannot be started.
    #[error("CUDA does not start: {0}")]
    NotStarted(String),
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
    builder.with_execution_providers([CUDA::default().build().error_on_failure()]).map_err(|error| {
        let reason = error.to_string();
        Box::new((DeviceError::NotStarted(reason), error.recover()))
    })
}
