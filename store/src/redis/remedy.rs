//! What to do about what Redis refuses.

/// A server's refusal, with what to do about it where its own words do not say so.
pub(super) fn with_remedy(code: &str, said: &str) -> String {
    match remedy(code) {
        Some(remedy) => format!("{said}: {remedy}"),
        None => said.to_owned(),
    }
}

fn remedy(code: &str) -> Option<&'static str> {
    Some(match code {
        "OOM" => "redis has reached maxmemory: give it more, or remove data; nothing was written",
        "READONLY" => {
            "the server is a replica: redis.urls must lead to the master (redis.mode sentinel and cluster find it by themselves)"
        }
        "NOREPLICAS" => "fewer replicas than min-replicas-to-write are there: bring them back",
        "LOADING" => "redis is starting: requests succeed once it has read its data",
        "MISCONF" => "redis cannot save to disk and takes no writes: see its log and disk",
        "CLUSTERDOWN" => "slots of the cluster have no master, or the node is cut off: see CLUSTER INFO",
        "TRYAGAIN" => "the group's slot is being moved between nodes: requests succeed once it has arrived",
        "MOVED" | "ASK" => "the server is a node of a Redis Cluster: set redis.mode = \"cluster\"",
        "NOPERM" => {
            "give the user this right (docs/operations.md has the list; rsc doctor names what is missing)"
        }
        "BUSY" => "a script of somebody blocks redis: see SCRIPT KILL",
        "NOAUTH" | "WRONGPASS" => "see redis.username and redis.password",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_servers_own_words_come_first() {
        assert!(with_remedy("OOM", "OOM command not allowed").starts_with("OOM command not allowed: "));
        assert_eq!(with_remedy("WRONGTYPE", "WRONGTYPE x"), "WRONGTYPE x");
    }
}
