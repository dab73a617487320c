//! Rails for tests: the real ones that `KVFERRY_RDMA` names, as pairs of devices that reach each other
//! (`a1:b1,a2:b2`), or else the stand-in for libibverbs.

use kvferry::{EngineConfig, FabricChoice, IoMode, RdmaConfig};
use kvferry_verbs::Library;
use kvferry_verbs_standin::{World, WorldOptions};

use crate::common::{Pair, layout};

pub struct Rails {
    /// The stand-in's world, where it is in use.
    pub world: Option<World>,
    pairs: Vec<(String, String)>,
}

impl Rails {
    /// Pairs of rails, `None` where there are fewer real ones.
    pub fn new(pairs: usize) -> Option<Self> {
        let Ok(named) = std::env::var("KVFERRY_RDMA") else {
            return Some(Self::stand_in(WorldOptions::devices(2 * pairs as u8)));
        };
        let named: Vec<(String, String)> = named
            .split(',')
            .map(|pair| {
                let (a, b) = pair.split_once(':').expect("KVFERRY_RDMA is a1:b1,a2:b2");
                (a.to_owned(), b.to_owned())
            })
            .collect();
        if named.len() < pairs {
            println!("skipped: KVFERRY_RDMA names {} pairs, this needs {pairs}", named.len());
            return None;
        }
        Some(Self { world: None, pairs: named.into_iter().take(pairs).collect() })
    }

    /// A world whose even devices are the prefill side's, and whose odd ones the decode side's.
    pub fn stand_in(options: WorldOptions) -> Self {
        let world = World::new(options);
        let names = world.device_names();
        let pairs = names.chunks(2).map(|pair| (pair[0].clone(), pair[1].clone())).collect();
        Self { world: Some(world), pairs }
    }

    pub fn rails(&self, prefill: bool) -> Vec<String> {
        let name = |(a, b): &(String, String)| if prefill { a.clone() } else { b.clone() };
        self.pairs.iter().map(name).collect()
    }

    /// Settings of one side, with RDMA required.
    pub fn config(&self, prefill: bool) -> EngineConfig {
        let rdma = RdmaConfig::default().rails(self.rails(prefill));
        let rdma = match &self.world {
            Some(world) => {
                // SAFETY: the stand-in keeps the ABI of libibverbs, and is linked into this process.
                let library =
                    unsafe { Library::from_resolver("the stand-in", |name| world.resolve(name)) };
                rdma.library(library.unwrap())
            }
            None => rdma,
        };
        crate::common::config(IoMode::Auto).fabric(FabricChoice::RequireRdma).rdma(rdma)
    }

    /// A prefill and a decode engine, joined by RDMA.
    pub fn pair(&self, pages: u32) -> Pair {
        self.pair_with(pages, |config| config)
    }

    pub fn pair_with(&self, pages: u32, change: impl Fn(EngineConfig) -> EngineConfig) -> Pair {
        let (a, b) = (change(self.config(true)), change(self.config(false)));
        Pair::with(a, b, layout(pages), layout(pages))
    }
}
