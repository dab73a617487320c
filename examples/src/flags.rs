//! The flags that `prefill`, `decode` and `pd-pair` share.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use kvferry::{EngineConfig, FabricChoice, IoMode, RdmaConfig, Secret, ZeroCopy};

use crate::model::{Model, ModelConfig};

/// How lanes are driven.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Io {
    /// io_uring where the kernel allows it, epoll otherwise.
    Auto,
    /// io_uring, or the process does not start.
    IoUring,
    /// epoll.
    Epoll,
}

impl From<Io> for IoMode {
    fn from(io: Io) -> Self {
        match io {
            Io::Auto => Self::Auto,
            Io::IoUring => Self::RequireIoUring,
            Io::Epoll => Self::Epoll,
        }
    }
}

/// What carries pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Fabric {
    /// RDMA where both sides have it, TCP otherwise.
    Auto,
    /// RDMA, or the process does not start.
    Rdma,
    /// TCP.
    Tcp,
}

impl From<Fabric> for FabricChoice {
    fn from(fabric: Fabric) -> Self {
        match fabric {
            Fabric::Auto => Self::Auto,
            Fabric::Rdma => Self::RequireRdma,
            Fabric::Tcp => Self::Tcp,
        }
    }
}

/// When lanes are sent from the pages without a copy into the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ZeroCopySends {
    /// On lanes that leave the host.
    Auto,
    /// On every lane, until the kernel reports that it copied.
    Try,
    /// Never.
    Off,
}

impl From<ZeroCopySends> for ZeroCopy {
    fn from(zero_copy: ZeroCopySends) -> Self {
        match zero_copy {
            ZeroCopySends::Auto => Self::Auto,
            ZeroCopySends::Try => Self::Try,
            ZeroCopySends::Off => Self::Off,
        }
    }
}

/// Flags that say which model is computed, and how; equal on both sides.
#[derive(Clone, Debug, Args)]
pub struct ModelArgs {
    /// A GGUF file of architecture `llama`; without it a small model with made-up weights.
    #[arg(long, value_name = "PATH.gguf")]
    pub model: Option<PathBuf>,
    /// Seed of the made-up weights, and of the decode side's order of pages.
    #[arg(long, default_value_t = 7)]
    pub seed: u64,
    /// Pages in each layer's K and V.
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u32).range(4..))]
    pub pages: u32,
    /// Tokens of a page.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub page_tokens: u32,
    /// Tokens of a chunk of the prompt; whole pages.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    pub chunk_tokens: u32,
    /// Layers of made-up K and V carried behind the model's, so that rooms weigh what a large model's
    /// do; 64 with pd-pair's stop-decode, else none.
    #[arg(long, value_parser = clap::value_parser!(u32).range(..=512))]
    pub ballast_layers: Option<u32>,
}

impl ModelArgs {
    /// Loads or makes the model.
    ///
    /// # Errors
    /// A file that is no such model; a chunk that is not whole pages.
    pub fn load(&self) -> Result<Model> {
        ensure!(
            self.chunk_tokens.is_multiple_of(self.page_tokens),
            "--chunk-tokens {} is not a multiple of --page-tokens {}",
            self.chunk_tokens,
            self.page_tokens
        );
        match &self.model {
            Some(path) => {
                Model::load_gguf(path).with_context(|| format!("the model {}", path.display()))
            }
            None => Model::seeded(ModelConfig::tiny(), self.seed),
        }
    }
}

/// Flags of the engine.
#[derive(Clone, Debug, Args)]
pub struct EngineArgs {
    /// Address to accept peers on; port 0 takes a free one.
    #[arg(long)]
    pub listen: Option<SocketAddr>,
    /// Address of a peer to connect to.
    #[arg(long)]
    pub connect: Option<SocketAddr>,
    /// File with the secret that all engines share; at least 16 bytes.
    #[arg(long)]
    pub secret_file: Option<PathBuf>,
    /// Listen on an address others can reach without a secret.
    #[arg(long)]
    pub insecure: bool,
    /// Serve metrics to Prometheus here; port 0 takes a free one.
    #[arg(long)]
    pub metrics_addr: Option<SocketAddr>,
    /// What carries pages.
    #[arg(long, value_enum, default_value_t = Fabric::Auto)]
    pub fabric: Fabric,
    /// A NIC port to use, as mlx5_0 or mlx5_0:1; may be given several times. Without it, all that are up.
    #[arg(long = "rail", value_name = "DEVICE[:PORT]")]
    pub rails: Vec<String>,
    /// Entry of the GID table to use on every rail; without it, chosen by type and address.
    #[arg(long)]
    pub gid_index: Option<u32>,
    /// How TCP lanes are driven.
    #[arg(long, value_enum, default_value_t = Io::Auto)]
    pub io: Io,
    /// When lanes are sent from the pages without a copy into the kernel.
    #[arg(long, value_enum, default_value_t = ZeroCopySends::Auto)]
    pub zero_copy: ZeroCopySends,
    /// Silence after which a peer counts as lost, in milliseconds.
    #[arg(long, default_value_t = 3000)]
    pub peer_silent_ms: u64,
    /// How long pages of a room that has ended may wait for the peer before it is fenced off, in
    /// milliseconds.
    #[arg(long, default_value_t = 500)]
    pub fence_after_ms: u64,
    /// Data connections to each peer.
    #[arg(long, default_value_t = 2)]
    pub lanes: u16,
    /// Name for logs, metrics and the peer's table.
    #[arg(long)]
    pub name: Option<String>,
}

impl EngineArgs {
    pub(crate) fn config(&self, name: &str) -> Result<EngineConfig> {
        let config = EngineConfig::default()
            .name(name)
            .listen(self.listen)
            .insecure(self.insecure)
            .fabric(self.fabric)
            .rdma(RdmaConfig::default().rails(self.rails.clone()).gid_index(self.gid_index))
            .io(self.io)
            .zero_copy(self.zero_copy)
            .peer_silent_ms(self.peer_silent_ms)
            .fence_after_ms(self.fence_after_ms)
            .lanes(self.lanes);
        Ok(match &self.secret_file {
            Some(path) => config.secret(read_secret(path)?),
            None => config,
        })
    }
}

fn read_secret(path: &Path) -> Result<Secret> {
    let bytes =
        std::fs::read(path).with_context(|| format!("the secret file {}", path.display()))?;
    Secret::new(bytes.trim_ascii()).with_context(|| format!("in {}", path.display()))
}
