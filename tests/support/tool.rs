//! The operator's tools: the real binary, run to its end.

use std::process::{Command, Output, Stdio};

use serde_json::Value;

use super::redis_server::RedisServer;

/// How to run a tool on one Redis.
#[derive(Clone)]
pub(crate) struct Tool {
    url: String,
    environment: Vec<(String, String)>,
}

/// What came of a run.
#[derive(Clone, Debug)]
pub(crate) struct Run {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Run {
    /// The document on standard output.
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// Demands that all went well.
    pub(crate) fn expect_success(self) -> Self {
        assert_eq!(self.code, 0, "{self:?}");
        self
    }
}

impl Tool {
    /// Tools on this Redis.
    pub(crate) fn on(redis: &RedisServer) -> Self {
        Tool::at(&redis.url())
    }

    /// Tools on whatever is there.
    pub(crate) fn at(url: &str) -> Self {
        Tool { url: url.to_owned(), environment: Vec::new() }
    }

    /// One configuration key through the environment: `("coordination", "member-lease-ttl", "3s")`.
    pub(crate) fn set(mut self, section: &str, key: &str, value: &str) -> Self {
        let name = format!("RSC_{section}__{key}").to_uppercase().replace('-', "_");
        self.environment.push((name, value.to_owned()));
        self
    }

    /// Runs `rsc` with these arguments. Whatever else the test does goes on meanwhile.
    pub(crate) async fn run(&self, arguments: &[&str]) -> Run {
        let mut command = Command::new(env!("CARGO_BIN_EXE_rsc"));
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("RSC_")) {
            command.env_remove(name);
        }
        command.args(arguments).args(["--redis-url", &self.url]).envs(self.environment.iter().cloned());
        command.stdin(Stdio::null());
        let output: Output = tokio::task::spawn_blocking(move || command.output()).await.unwrap().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        let (stdout, stderr) = (text(output.stdout), text(output.stderr));
        Run { code: output.status.code().unwrap(), stdout, stderr }
    }

    /// Runs `rsc doctor`.
    pub(crate) async fn doctor(&self) -> Examined {
        let run = self.run(&["doctor", "--output", "json"]).await;
        let document = run.json();
        let finding = |finding: &Value| {
            let text = |name: &str| finding[name].as_str().map(str::to_owned);
            Finding {
                id: text("id").unwrap(),
                level: text("level").unwrap(),
                subject: text("subject").unwrap(),
                message: text("message").unwrap(),
                remedy: text("remedy"),
            }
        };
        let findings: Vec<Finding> = document["findings"].as_array().unwrap().iter().map(finding).collect();
        let has_errors = findings.iter().any(|finding| finding.level == "error");
        assert_eq!(run.code, i32::from(has_errors), "{run:?}");
        Examined { findings, document }
    }
}

/// One finding of the doctor.
#[derive(Clone, Debug)]
pub(crate) struct Finding {
    pub(crate) id: String,
    pub(crate) level: String,
    pub(crate) subject: String,
    pub(crate) message: String,
    pub(crate) remedy: Option<String>,
}

/// Everything that the doctor found.
#[derive(Clone, Debug)]
pub(crate) struct Examined {
    pub(crate) findings: Vec<Finding>,
    pub(crate) document: Value,
}

impl Examined {
    /// The level of the one finding with this id; `None` where there is none.
    pub(crate) fn level(&self, id: &str) -> Option<&str> {
        let found: Vec<&Finding> = self.findings.iter().filter(|finding| finding.id == id).collect();
        assert!(found.len() < 2, "{id}: {found:#?}");
        found.first().map(|finding| finding.level.as_str())
    }

    /// Demands one finding with this id and level, whose subject or message contains `part`; what is wrong has a remedy.
    pub(crate) fn expect(&self, id: &str, level: &str, part: &str) -> &Finding {
        let is_it = |finding: &&Finding| {
            finding.id == id
                && finding.level == level
                && (finding.message.contains(part) || finding.subject.contains(part))
        };
        let found: Vec<&Finding> = self.findings.iter().filter(is_it).collect();
        let [finding] = found[..] else {
            panic!("{} findings {id} ({level}) about {part:?} among {:#?}", found.len(), self.findings)
        };
        let is_wrong = ["warning", "error"].contains(&level);
        assert_eq!(finding.remedy.is_some(), is_wrong, "{finding:?}");
        finding
    }

    /// The ids of what is a warning or an error, in their order.
    pub(crate) fn complaints(&self) -> Vec<&str> {
        let is_wrong = |finding: &&Finding| ["warning", "error"].contains(&finding.level.as_str());
        self.findings.iter().filter(is_wrong).map(|finding| finding.id.as_str()).collect()
    }
}
