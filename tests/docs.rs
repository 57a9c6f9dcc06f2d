//! Documentation and code agree: error pages, links, section numbers, routes of the README.
#![expect(clippy::unwrap_used, clippy::panic, reason = "the helpers of a test fail like the test")]

mod support;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use rsc_protocol::ErrorCode;
use support::Daemon;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: impl AsRef<Path>) -> String {
    let path = root().join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Files of the tree whose names end in one of `endings`; build output and hidden directories are left out.
fn files(endings: &[&str]) -> Vec<PathBuf> {
    let (mut found, mut todo) = (Vec::new(), vec![root().to_owned()]);
    while let Some(directory) = todo.pop() {
        for entry in std::fs::read_dir(&directory).unwrap() {
            let (path, name) = entry.map(|entry| (entry.path(), entry.file_name())).unwrap();
            let name = name.to_string_lossy().into_owned();
            if path.is_dir() {
                if name != "target" && !name.starts_with('.') {
                    todo.push(path);
                }
            } else if endings.iter().any(|ending| name.ends_with(ending)) {
                found.push(path);
            }
        }
    }
    found
}

/// What follows each `before` in `text`.
fn after<'t>(text: &'t str, before: &'t str) -> impl Iterator<Item = &'t str> {
    text.match_indices(before).map(move |(at, _)| &text[at + before.len()..])
}

#[test]
fn every_error_code_has_a_page_that_says_what_the_table_says() {
    for code in ErrorCode::ALL {
        let page = read(format!("docs/errors/{}.md", code.as_str()));
        let action = serde_json::to_string(&code.client_action()).unwrap().replace('"', "");
        let retry = code
            .retry_after_seconds()
            .map(|seconds| format!(", `Retry-After: {seconds}`"))
            .unwrap_or_default();
        let head = format!(
            "# {}\n\nHTTP {}{retry}. What a client should do: `{action}`.\n\n## What happened\n",
            code.as_str(),
            code.http_status()
        );
        assert!(page.starts_with(&head), "{} should begin with:\n{head}", code.as_str());
        for chapter in ["\n## What the client does\n", "\n## What to look at\n"] {
            assert!(page.contains(chapter), "{}: {chapter}", code.as_str());
        }
    }
}

#[test]
fn every_error_page_is_about_a_code_that_exists() {
    for entry in std::fs::read_dir(root().join("docs/errors")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let code = name.strip_suffix(".md").unwrap_or(&name);
        assert!(ErrorCode::ALL.iter().any(|known| known.as_str() == code), "{name}: no such code");
    }
}

#[test]
fn every_relative_link_leads_somewhere() {
    let mut seen = 0;
    for file in files(&[".md"]) {
        let text = read(&file);
        for target in after(&text, "](").filter_map(|rest| rest.split(')').next()) {
            let path = target.split('#').next().unwrap_or_default();
            if path.is_empty() || path.contains("://") {
                continue;
            }
            seen += 1;
            let directory = file.parent().unwrap();
            assert!(directory.join(path).exists(), "{}: {target} leads nowhere", file.display());
        }
    }
    assert!(seen > 20, "only {seen} links found");
}

/// `4`, `4.1`, and each rule of 4.1 as `4.1.10`.
fn sections_of_the_protocol() -> BTreeSet<String> {
    let mut sections = BTreeSet::new();
    let mut section = String::new();
    for line in read("docs/protocol.md").lines() {
        let number = leading_number(line.trim_start_matches('#').trim_start());
        if line.starts_with("##") && !number.is_empty() {
            number.clone_into(&mut section);
            sections.insert(number.to_owned());
        } else if section == "4.1" && !number.is_empty() && line[number.len()..].starts_with(". ") {
            sections.insert(format!("{section}.{number}"));
        }
    }
    sections
}

/// The number that `text` begins with: `4.1` of `4.1 Deciding`; empty if it begins with none.
fn leading_number(text: &str) -> &str {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    text[..end].trim_end_matches('.')
}

#[test]
fn every_reference_to_the_protocol_names_a_section_that_exists() {
    let sections = sections_of_the_protocol();
    for expected in ["1", "4.1.1", "4.1.11", "4.5", "12"] {
        assert!(sections.contains(expected), "{expected} is not among {sections:?}");
    }
    let mut seen = 0;
    for file in files(&[".rs", ".lua", ".toml", ".md"]) {
        // Line breaks of comments may stand between the words.
        let text = read(&file).replace("///", " ").replace("//!", " ").replace("//", " ");
        let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
        for before in ["protocol ", "Protocol "] {
            for rest in after(&text, before) {
                let number = leading_number(rest);
                if number.is_empty() {
                    continue;
                }
                seen += 1;
                let shown: String = rest.chars().take(40).collect();
                assert!(sections.contains(number), "{}: no section for `{before}{shown}`", file.display());
                let rule = rest[number.len()..].trim_start().strip_prefix("rule ").map(leading_number);
                if let Some(rule) = rule {
                    let rule = format!("{number}.{rule}");
                    assert!(sections.contains(&rule), "{}: no rule for `{before}{shown}`", file.display());
                }
            }
        }
    }
    assert!(seen > 100, "only {seen} references found");
}

/// The words of every `curl` command of a text's code blocks; a line that ends in a backslash goes on.
fn curl_commands(text: &str) -> Vec<Vec<String>> {
    let blocks = text.split("```").skip(1).step_by(2).map(|block| block.replace("\\\n", " "));
    blocks.filter(|block| block.trim_start().starts_with("curl ")).map(|block| shell_words(&block)).collect()
}

/// Words as a shell splits them, as far as single quotes are concerned.
fn shell_words(command: &str) -> Vec<String> {
    let mut words = Vec::new();
    for (at, part) in command.split('\'').enumerate() {
        if at % 2 == 1 {
            words.push(part.to_owned());
        } else {
            words.extend(part.split_whitespace().map(str::to_owned));
        }
    }
    words
}

#[tokio::test]
async fn every_request_of_the_readme_works_in_its_order() {
    let daemon = Daemon::memory().start();
    let http = reqwest::Client::new();
    let commands = curl_commands(&read("README.md"));
    assert_eq!(commands.len(), 5);
    for words in commands {
        let (mut url, mut body) = (None, None);
        let mut rest = words[1..].iter();
        while let Some(word) = rest.next() {
            match word.as_str() {
                "-s" => {}
                "-H" => assert_eq!(rest.next().unwrap(), "content-type: application/json"),
                "-d" => body = rest.next().cloned(),
                word => url = word.strip_prefix("http://127.0.0.1:8080/"),
            }
        }
        let url = format!("http://{}/{}", daemon.address(), url.unwrap());
        let request = match body {
            Some(body) => http.post(&url).header("content-type", "application/json").body(body),
            None => http.get(&url),
        };
        let answer = request.send().await.unwrap();
        let (status, text) = (answer.status(), answer.text().await.unwrap());
        assert!(status.is_success(), "{words:?}: {status} {text}");
    }
}
