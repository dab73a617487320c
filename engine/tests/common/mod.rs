//! Two engines in one process, with pools whose pages can be told apart.
#![allow(
    dead_code,
    missing_docs,
    unreachable_pub,
    reason = "each test binary uses its own part of the harness"
)]

pub mod child;
pub mod proxy;

use std::net::SocketAddr;
use std::time::Duration;

use kvferry::{
    AllocOptions, Dtype, Engine, EngineConfig, HeadOrder, Incarnation, IoMode, Planes, Pool,
    PoolId, PoolLayout,
};

/// Far longer than anything here takes; a test that reaches it hangs, and says where.
pub const PATIENCE: Duration = Duration::from_secs(30);

pub fn local() -> SocketAddr {
    "127.0.0.1:0".parse().unwrap()
}

/// 3 layers of K and V, 8 tokens a page, 2 heads of 64 bytes: 1 KiB pages.
pub fn layout(pages: u32) -> PoolLayout {
    PoolLayout {
        name: "kv".to_owned(),
        layers: 0..3,
        planes: Planes::KeyValue,
        pages,
        page_tokens: 8,
        dtype: Dtype::F16,
        total_heads: 2,
        heads: 0..2,
        head_bytes: 64,
        order: HeadOrder::TokenMajor,
    }
}

/// An engine and a clone of its first pool.
pub struct Node {
    pub engine: Engine,
    pub pool: Pool,
}

impl Node {
    pub fn start(config: EngineConfig, layout: PoolLayout) -> Self {
        let pool = Pool::allocate(layout, AllocOptions { huge_pages: false }).unwrap();
        let mut builder = Engine::builder(config);
        builder.pool(pool.clone()).unwrap();
        Self { engine: builder.start().unwrap(), pool }
    }

    /// Fills every page with bytes that name their layer, plane, page and place.
    pub fn paint(&self, salt: u8) {
        self.each_page(|layer, plane, page, region, offset, bytes| {
            let content = painted(layer, plane, page, salt, bytes);
            region.write_at(offset, &content).unwrap();
        });
    }

    /// Fills whole pages with one byte.
    pub fn fill(&self, pages: std::ops::Range<u32>, byte: u8) {
        self.each_page(|_, _, page, region, offset, bytes| {
            if pages.contains(&page) {
                region.write_at(offset, &vec![byte; bytes]).unwrap();
            }
        });
    }

    pub fn page(&self, layer: u32, plane: u32, page: u32) -> Vec<u8> {
        let (region, offset) = self.pool.locate(layer, plane, page).unwrap();
        let mut out = vec![0; self.pool.layout().page_bytes() as usize];
        region.read_at(offset, &mut out).unwrap();
        out
    }

    fn each_page(&self, mut with: impl FnMut(u32, u32, u32, &kvferry::Region, usize, usize)) {
        let layout = self.pool.layout();
        for layer in 0..layout.layer_count() {
            for plane in 0..layout.planes.count() {
                for page in 0..layout.pages {
                    let (region, offset) = self.pool.locate(layer, plane, page).unwrap();
                    with(layer, plane, page, region, offset, layout.page_bytes() as usize);
                }
            }
        }
    }

    /// Every page that `expect` does not name must be zero; named ones must hold the painted page.
    pub fn assert_pages(&self, salt: u8, expect: &[(u32, u32)]) {
        self.each_page(|layer, plane, page, region, offset, bytes| {
            let mut content = vec![0; bytes];
            region.read_at(offset, &mut content).unwrap();
            let want = match expect.iter().find(|(_, dst)| *dst == page) {
                Some((src, _)) => painted(layer, plane, *src, salt, bytes),
                None => vec![0; bytes],
            };
            assert!(content == want, "layer {layer} plane {plane} page {page} holds other bytes");
        });
    }
}

pub fn painted(layer: u32, plane: u32, page: u32, salt: u8, bytes: usize) -> Vec<u8> {
    let seed = (layer as usize * 31 + plane as usize * 17 + page as usize * 7 + salt as usize) | 1;
    (0..bytes).map(|i| (i.wrapping_mul(seed) ^ (i >> 8) ^ seed) as u8 | 1).collect()
}

pub fn config(io: IoMode) -> EngineConfig {
    EngineConfig::default().io(io).spin_us(20u64)
}

/// A prefill and a decode engine, connected: the decode side dials.
pub struct Pair {
    pub prefill: Node,
    pub decode: Node,
    /// The prefill engine, as the decode engine knows it.
    pub peer: Incarnation,
}

pub const KV: PoolId = PoolId::FIRST;

impl Pair {
    pub fn new(io: IoMode) -> Self {
        Self::with(config(io), config(io), layout(64), layout(64))
    }

    pub fn with(
        prefill: EngineConfig,
        decode: EngineConfig,
        from: PoolLayout,
        to: PoolLayout,
    ) -> Self {
        let prefill = Node::start(prefill.listen(local()), from);
        let decode = Node::start(decode, to);
        let addr = prefill.engine.listen_addr().unwrap();
        let peer = kvferry::block_on(decode.engine.connect(addr)).unwrap();
        Self { prefill, decode, peer }
    }
}

/// Waits for a future with the patience of a test.
pub fn wait<F: Future>(future: F) -> F::Output {
    kvferry::block_on_timeout(future, PATIENCE).expect("the test's patience is over")
}
