//! kvferry carries KV cache from prefill engines to decode engines in disaggregated LLM serving.
//!
//! One request's transfer is a **room**. The decode side grants pages to it, the prefill side writes
//! chunks of pages and finishes it, and both sides learn the same end, exactly once: *done* when every
//! byte that was counted has landed, or *failed* with the first cause.
//!
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use kvferry::{AllocOptions, Chunk, Engine, EngineConfig, GrantSpec, OpenOptions, Pool, PoolId, PoolLayout};
//!
//! let layout = PoolLayout::opaque("kv", 0..32, 1024, 65536);
//!
//! // Prefill: listens, opens the room, writes its pages once they are granted.
//! let mut prefill = Engine::builder(EngineConfig::default().listen("127.0.0.1:0".parse::<std::net::SocketAddr>()?));
//! let kv = prefill.pool(Pool::allocate(layout.clone(), AllocOptions::default())?)?;
//! let prefill = prefill.start()?;
//! let sending = prefill.open(7.into(), OpenOptions::default())?;
//!
//! // Decode: connects, grants three of its own pages.
//! let mut decode = Engine::builder(EngineConfig::default());
//! decode.pool(Pool::allocate(layout, AllocOptions::default())?)?;
//! let decode = decode.start()?;
//! let peer = decode.connect(prefill.listen_addr().ok_or("not listening")?).await?;
//! let receiving = decode.grant(peer, GrantSpec::new(7.into()).pages(PoolId::FIRST, [9, 4, 11]))?;
//!
//! sending.granted().await?;
//! sending.write(Chunk::new(kv, [0, 1, 2], 0..3)).await?;
//! sending.finish("first token".into())?;
//! assert_eq!(&receiving.done().await?.aux[..], b"first token");
//! sending.done().await?;
//! # Ok(()) }
//! ```
//!
//! Handles are futures for async callers and plain numbers for schedulers that spin
//! ([`RoomHandle::state`], [`poll_many`]); no runtime of the caller's is needed, [`block_on`] waits
//! without one. See `ARCHITECTURE.md` for how the crate is built.

mod api;
mod config;
mod control;
mod fabric;
mod failure;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod ids;
mod memory;
mod mutations;
mod observe;
mod peers;
mod plan;
mod room;
#[cfg(feature = "sim")]
#[doc(hidden)]
pub mod sim;
mod sync;
mod wire;
mod worker;

pub use api::block_on::{block_on, block_on_timeout};
pub use api::engine::{DeregisterError, Engine};
pub use api::group::Group;
pub use api::handle::{RoomHandle, RoomReport, min_state, poll_many};
pub use api::recv::{GrantError, GrantSpec, Received, RecvRoom};
pub use api::send::{Chunk, Granted, GrantedPages, OpenError, OpenOptions, SendRoom, WriteError};
pub use api::start::{EngineBuilder, StartError};
pub use config::{
    ConfigError, EngineConfig, FabricChoice, IoMode, LANES_MAX, ROOM_TIMEOUT_MS_MAX, RdmaConfig,
    SECRET_BYTES_MIN, Secret, ZeroCopy,
};
pub use control::{ConnectError, ConnectStage};
pub use fabric::rdma::RdmaError;
pub use failure::{CAUSE_BYTES_MAX, CAUSES_MAX, Failure, FailureKind, Landed};
pub use ids::{Epoch, Incarnation, Role, RoomId, RoomState};
pub use memory::{
    AllocError, AllocOptions, Dtype, HeadOrder, IntoVecError, LAYERS_MAX, LayoutError,
    LayoutMismatch, PAGE_BYTES_MAX, POOL_NAME_BYTES_MAX, POOLS_MAX, PageArray, Planes, Pool,
    PoolId, PoolLayout, Region, RegionKind, RegionRangeError,
};
pub use peers::{
    FabricInfo, LaneInfo, LanePath, PathFault, PeerHealth, PeerInfo, RailInfo, RdmaEnd, RdmaPath,
    RdmaReport,
};
pub use wire::message::{
    AUX_BYTES_MAX, GRANT_NOTE_BYTES_MAX, GRANT_PAGES_MAX, LaneIo, NAME_BYTES_MAX, Refusal,
};
pub use worker::run::IoReport;
pub use worker::submit::AuxSlot;
