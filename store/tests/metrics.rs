//! The metrics that the crate's documentation lists.

// Clippy's own exception reaches test functions only, not the helpers beside them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use metrics_exporter_prometheus::PrometheusBuilder;
use rsc_store::GroupStore;
use support::server::{RedisServer, free_port};
use support::stores::{HISTORY, METADATA, store};
use support::{applied, created, enter, group, lease_only, structural, token};

#[tokio::test]
async fn every_metric_is_counted_under_its_name() {
    let recorder = PrometheusBuilder::new().build_recorder();
    let rendered = recorder.handle();
    metrics::set_global_recorder(recorder).unwrap();
    work().await;
    let text = rendered.render();
    for line in [
        "rsc_store_enter_total{outcome=\"unchanged\"} 2",
        "rsc_store_enter_total{outcome=\"missing\"} 1",
        "rsc_store_enter_total{outcome=\"busy\"} 1",
        "rsc_store_enter_total{outcome=\"unavailable\"} 1",
        "rsc_store_commit_total{operation=\"create\",outcome=\"applied\"} 1",
        "rsc_store_commit_total{operation=\"create\",outcome=\"conflict_exists\"} 1",
        "rsc_store_commit_total{operation=\"structural\",outcome=\"applied\"} 1",
        "rsc_store_commit_total{operation=\"lease_only\",outcome=\"applied\"} 1",
        "rsc_store_commit_total{operation=\"lease_only\",outcome=\"conflict_mutex_lost\"} 1",
        "rsc_store_commit_total{operation=\"delete\",outcome=\"not_applied\"} 1",
        "rsc_store_ttl_removed_total 1",
        "rsc_store_history_failed_total 1",
        "rsc_store_connect_total{outcome=\"connected\"} 1",
        "rsc_store_connect_total{outcome=\"failed\"} 1",
        "rsc_store_script_resent_total{command=\"commit\"} 1",
        "rsc_store_command_seconds_count{command=\"enter\"} 5",
        "rsc_store_command_seconds_count{command=\"commit\"} 3",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
    }
}

async fn work() {
    let server = RedisServer::start();
    let store_up = store(server.url());
    let group = group("orders");
    let stamp = created(&store_up, &group).await;
    let _exists = store_up.create(&group, &token(), None, &structural("{}", 1)).await;

    let (holder, _) = enter(&store_up, &group, Some(&stamp)).await;
    store_up.enter(&group, &token(), None, None).await.unwrap();
    server.ok(&["PEXPIRE", METADATA, "600000"]);
    server.ok(&["SET", HISTORY, "no stream"]);
    server.ok(&["SCRIPT", "FLUSH"]);
    let mut write = structural("{}", 2);
    write.history = Some("{}".into());
    let stamp = applied(store_up.commit(&group, &holder, &stamp, &write).await);

    let (holder, _) = enter(&store_up, &group, Some(&stamp)).await;
    let write = lease_only(&[("m", "{}")]);
    let stamp = applied(store_up.commit(&group, &holder, &stamp, &write).await);
    let _lost = store_up.commit(&group, &holder, &stamp, &write).await;
    enter(&store_up, &support::group("parcels"), None).await;

    let store_down = store(format!("redis://127.0.0.1:{}", free_port()));
    store_down.enter(&group, &token(), None, None).await.unwrap_err();
    // The failure just now answers this one too.
    let _down = store_down.delete(&group, &token(), None, None).await;
}
