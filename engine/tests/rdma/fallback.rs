//! Which fabric carries pages is never silent.

use kvferry::{
    ConnectError, Engine, EngineConfig, FabricChoice, IoMode, RdmaError, Refusal, StartError,
};
use kvferry_verbs_standin::{Call, UnknownRoute, WorldOptions};

use super::*;
use crate::common::Node;

const ENETUNREACH: i32 = 101;

#[test]
fn where_rdma_is_required_and_a_rail_does_not_exist_the_engine_does_not_start() {
    let rails = Rails::stand_in(WorldOptions::pair());
    let config = rails.config(true);
    let rdma = config.rdma.clone().rails(vec!["mlx5_7".to_owned()]);
    let error = Engine::builder(config.rdma(rdma)).start().unwrap_err();
    let StartError::NoRdma(RdmaError::NoSuchRail { name, have }) = &error else {
        panic!("{error}")
    };
    assert_eq!(name, "mlx5_7");
    assert!(have.contains(&rails.rails(true)[0]), "{error}");
}

#[test]
fn a_peer_without_rdma_is_refused_by_one_that_requires_it_and_both_say_why() {
    let rails = Rails::stand_in(WorldOptions::pair());
    let prefill = Node::start(rails.config(true).listen(common::local()), layout(8));
    let tcp = common::config(IoMode::Auto).fabric(FabricChoice::Tcp);
    let decode = Node::start(tcp, layout(8));
    let error = wait(decode.engine.connect(prefill.engine.listen_addr().unwrap())).unwrap_err();
    let ConnectError::Refused { refusal: Refusal::NoRdma(why), .. } = &error else {
        panic!("{error}")
    };
    assert_eq!(why, "this side has none", "{error}");
}

#[test]
fn where_one_side_has_no_rdma_pages_go_over_tcp_and_both_say_why() {
    let rails = Rails::stand_in(WorldOptions::pair());
    let auto = rails.config(true).fabric(FabricChoice::Auto);
    let tcp = common::config(IoMode::Auto).fabric(FabricChoice::Tcp);
    let pair = Pair::with(auto, tcp, layout(8), layout(8));
    pair.prefill.paint(2);
    let crossing = start(&pair, 1, vec![5]);
    send(&crossing, vec![3]);
    finish(crossing);
    pair.decode.assert_pages(2, &[(3, 5)]);
    let why = |engine: &Engine| engine.peers()[0].why_not_rdma.clone();
    assert_eq!(why(&pair.prefill.engine).as_deref(), Some("the peer has none"));
    assert_eq!(why(&pair.decode.engine).as_deref(), Some("TCP was asked for"));
    assert!(matches!(pair.decode.engine.peers()[0].fabric, FabricInfo::Tcp { .. }));
}

#[test]
fn where_no_path_joins_the_rails_pages_go_over_tcp_and_the_path_is_named() {
    let silent = WorldOptions::pair().with(|device| device.unknown_route = UnknownRoute::Silent);
    let rails = Rails::stand_in(silent);
    let world = rails.world.as_ref().unwrap();
    // Every way to the peer is refused, from both sides.
    for device in 0..2 {
        let to_rtr = Call::ModifyQp(kvferry_verbs_standin::sys::ibv_qp_state::IBV_QPS_RTR);
        world.fail_calls(device, to_rtr, ENETUNREACH, 0, u64::MAX);
    }
    let auto = |config: EngineConfig| config.fabric(FabricChoice::Auto);
    let pair = rails.pair_with(8, auto);
    pair.prefill.paint(2);
    let crossing = start(&pair, 1, vec![5]);
    send(&crossing, vec![3]);
    finish(crossing);
    pair.decode.assert_pages(2, &[(3, 5)]);
    let peer = &pair.decode.engine.peers()[0];
    assert!(matches!(peer.fabric, FabricInfo::Tcp { .. }), "{peer:?}");
    let why = peer.why_not_rdma.as_deref().unwrap();
    assert!(why.contains("finds no way to the peer's") && why.contains("GID"), "{why}");
    assert_eq!(peer.faults.len(), 1);
    assert!(peer.faults[0].failures >= 3, "{:?}", peer.faults);
}

#[test]
fn where_rdma_is_required_and_no_path_joins_the_rails_connecting_says_so() {
    let rails = Rails::stand_in(WorldOptions::pair());
    let world = rails.world.as_ref().unwrap();
    let to_rtr = Call::ModifyQp(kvferry_verbs_standin::sys::ibv_qp_state::IBV_QPS_RTR);
    world.fail_calls(0, to_rtr, ENETUNREACH, 0, u64::MAX);
    let soon = |config: EngineConfig| config.connect_timeout_ms(700u64);
    let prefill = Node::start(soon(rails.config(true)).listen(common::local()), layout(8));
    let decode = Node::start(soon(rails.config(false)), layout(8));
    let error = wait(decode.engine.connect(prefill.engine.listen_addr().unwrap())).unwrap_err();
    let ConnectError::NoRdmaLane { cause, .. } = &error else { panic!("{error}") };
    assert!(cause.contains("the peer: "), "the listener's reason is told: {cause}");
}
