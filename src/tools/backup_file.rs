//! The file that `rsc backup` writes and `rsc restore` reads: a JSON document on each line, the first one says what
//! the file is, the last one that it is whole.

use std::collections::BTreeMap;
use std::io::{self, Write};

use rsc_core::{RawFields, Tombstone};
use rsc_protocol::Timestamp;
use rsc_protocol::monitoring::{FieldText, RecordId};
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// What the first line calls the file.
const FORMAT: &str = "rsc-backup";
/// The version of the format that is written, and the highest that is read.
const VERSION: u64 = 1;

/// One line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "camelCase", rename_all_fields = "camelCase")]
enum Line {
    Header(Header),
    Group(Box<SavedGroup>),
    Tombstone(Tombstone),
    End {
        /// `group` lines before.
        groups: u64,
        /// `tombstone` lines before.
        tombstones: u64,
    },
}

/// What the file is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Header {
    format: String,
    version: u64,
    /// Redis time when the backup began.
    pub(super) created_at: Timestamp,
    /// `store.key-prefix` of the keys.
    pub(super) key_prefix: String,
    /// The `rsc` that wrote it.
    written_by: String,
}

/// One group's record, as it was stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct SavedGroup {
    pub(super) stream_prefix: String,
    pub(super) consumer_group: String,
    /// Redis time when it was read.
    pub(super) read_at: Timestamp,
    /// Why the record could not be used already when it was saved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) unusable: Option<String>,
    /// Every field of the hash; bytes that are no text as `{"base64": "…"}`.
    fields: BTreeMap<String, FieldText>,
    /// What happened to the group, oldest first, if that was asked for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) history: Vec<HistoryLine>,
}

/// One entry of a history.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct HistoryLine {
    pub(super) id: RecordId,
    pub(super) entry: String,
}

impl SavedGroup {
    pub(super) fn new(
        stream_prefix: &str,
        consumer_group: &str,
        read_at: Timestamp,
        fields: RawFields,
    ) -> Self {
        let fields = fields.into_iter().map(|(name, value)| (name, FieldText(value))).collect();
        SavedGroup {
            stream_prefix: stream_prefix.to_owned(),
            consumer_group: consumer_group.to_owned(),
            read_at,
            unusable: None,
            fields,
            history: Vec::new(),
        }
    }

    /// Every field of the hash.
    pub(super) fn fields(&self) -> RawFields {
        self.fields.iter().map(|(name, value)| (name.clone(), value.0.clone())).collect()
    }
}

/// Writes a file line by line.
pub(super) struct Writer<W> {
    out: W,
    pub(super) groups: u64,
    pub(super) tombstones: u64,
}

impl<W: Write> Writer<W> {
    pub(super) fn begin(out: W, created_at: Timestamp, key_prefix: &str) -> io::Result<Self> {
        let mut writer = Writer { out, groups: 0, tombstones: 0 };
        writer.line(&Line::Header(Header {
            format: FORMAT.to_owned(),
            version: VERSION,
            created_at,
            key_prefix: key_prefix.to_owned(),
            written_by: format!("rsc {}", env!("CARGO_PKG_VERSION")),
        }))?;
        Ok(writer)
    }

    pub(super) fn group(&mut self, group: SavedGroup) -> io::Result<()> {
        self.groups += 1;
        self.line(&Line::Group(Box::new(group)))
    }

    pub(super) fn tombstone(&mut self, tombstone: Tombstone) -> io::Result<()> {
        self.tombstones += 1;
        self.line(&Line::Tombstone(tombstone))
    }

    /// Says that the file is whole, and gives back what was written to.
    pub(super) fn end(mut self) -> io::Result<W> {
        let (groups, tombstones) = (self.groups, self.tombstones);
        self.line(&Line::End { groups, tombstones })?;
        self.out.flush()?;
        Ok(self.out)
    }

    fn line(&mut self, line: &Line) -> io::Result<()> {
        serde_json::to_writer(&mut self.out, line)?;
        self.out.write_all(b"\n")
    }
}

/// Why a file is no backup that this version reads.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub(super) enum FileError {
    /// Not even its first line.
    #[error("not a file of rsc backup: {0}")]
    Foreign(String),
    /// Written by a later version.
    #[error("the file has format version {0}, this rsc reads up to {VERSION}: use a newer one")]
    Version(u64),
    /// A line in it.
    #[error("line {line}: {problem}")]
    Line {
        /// From 1.
        line: usize,
        /// What is wrong with it.
        problem: String,
    },
    /// The last line is missing, or does not count what is before it.
    #[error("the file is not whole: {0}; nothing of it was restored")]
    NotWhole(String),
}

/// A file that was read to its end once: every line can be read, and it is whole.
#[derive(Debug)]
pub(super) struct BackupFile<'t> {
    pub(super) header: Header,
    /// The lines between the first and the last.
    lines: Vec<(usize, &'t str)>,
}

/// What a file holds.
#[derive(Debug)]
pub(super) enum Saved {
    Group(Box<SavedGroup>),
    Tombstone(Tombstone),
}

impl<'t> BackupFile<'t> {
    pub(super) fn read(text: &'t str) -> Result<Self, FileError> {
        let mut lines = text.lines().enumerate().map(|(at, line)| (at + 1, line)).collect::<Vec<_>>();
        if lines.is_empty() {
            return Err(FileError::Foreign("it is empty".to_owned()));
        }
        let header = header(lines.remove(0).1)?;
        let Some((_, last)) = lines.pop() else {
            return Err(FileError::NotWhole("it ends after its first line".to_owned()));
        };
        let Ok(Line::End { groups, tombstones }) = serde_json::from_str(last) else {
            return Err(FileError::NotWhole("its last line is missing".to_owned()));
        };
        let file = BackupFile { header, lines };
        let (mut groups_found, mut tombstones_found) = (0, 0);
        for saved in file.saved() {
            match saved? {
                Saved::Group(_) => groups_found += 1,
                Saved::Tombstone(_) => tombstones_found += 1,
            }
        }
        if (groups_found, tombstones_found) != (groups, tombstones) {
            return Err(FileError::NotWhole(format!(
                "it has {groups_found} groups and {tombstones_found} tombstones and should have {groups} and {tombstones}"
            )));
        }
        Ok(file)
    }

    /// Everything in it, in its order.
    pub(super) fn saved(&self) -> impl Iterator<Item = Result<Saved, FileError>> + '_ {
        self.lines.iter().map(|(line, text)| match serde_json::from_str(text) {
            Ok(Line::Group(group)) => Ok(Saved::Group(group)),
            Ok(Line::Tombstone(tombstone)) => Ok(Saved::Tombstone(tombstone)),
            Ok(Line::Header(_) | Line::End { .. }) => {
                Err(FileError::Line { line: *line, problem: "a first or last line in the middle".to_owned() })
            }
            Err(error) => Err(FileError::Line { line: *line, problem: error.to_string() }),
        })
    }
}

fn header(line: &str) -> Result<Header, FileError> {
    // A later version's header may well have another shape.
    #[derive(Deserialize)]
    struct Outline {
        format: String,
        version: u64,
    }
    let foreign = |error: serde_json::Error| FileError::Foreign(error.to_string());
    let outline: Outline = serde_json::from_str(line).map_err(foreign)?;
    if outline.format != FORMAT {
        return Err(FileError::Foreign(format!("its format is {:?}", outline.format)));
    }
    if outline.version > VERSION {
        return Err(FileError::Version(outline.version));
    }
    serde_json::from_str(line).map_err(foreign)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written() -> String {
        let fields = RawFields::from([
            ("aggregate".to_owned(), "{\"a\": \"ä\n\"}".into()),
            ("bytes".to_owned(), vec![0, 255, 10]),
        ]);
        let group = SavedGroup::new("orders", "billing", Timestamp::from_millis(5), fields);
        let mut writer = Writer::begin(Vec::new(), Timestamp::from_millis(3), "p").unwrap();
        writer.group(group).unwrap();
        writer.tombstone(Tombstone { group_epoch: 7, ..Tombstone::default() }).unwrap();
        String::from_utf8(writer.end().unwrap()).unwrap()
    }

    #[test]
    fn what_is_written_is_read_byte_for_byte() {
        let text = written();
        assert_eq!(text.lines().count(), 4, "{text}");
        let file = BackupFile::read(&text).unwrap();
        assert_eq!((file.header.key_prefix.as_str(), file.header.created_at.as_millis()), ("p", 3));
        let saved: Vec<Saved> = file.saved().collect::<Result<_, _>>().unwrap();
        let [Saved::Group(group), Saved::Tombstone(tombstone)] = &saved[..] else { panic!("{saved:?}") };
        assert_eq!(group.fields()["aggregate"], "{\"a\": \"ä\n\"}".as_bytes());
        assert_eq!(group.fields()["bytes"], [0, 255, 10]);
        assert_eq!(tombstone.group_epoch, 7);
    }

    #[test]
    fn what_is_cut_off_or_none_of_ours_is_refused_before_anything_is_done() {
        let text = written();
        for end in 0..text.len() - 1 {
            let Some(cut) = text.get(..end) else { continue };
            assert!(BackupFile::read(cut).is_err(), "cut to {end} bytes");
        }
        let without_a_line = text.lines().filter(|line| !line.contains("\"group\"")).collect::<Vec<_>>();
        assert!(matches!(BackupFile::read(&without_a_line.join("\n")), Err(FileError::NotWhole(_))));
        let later = text.replacen("\"version\":1", "\"version\":2", 1);
        assert!(matches!(BackupFile::read(&later), Err(FileError::Version(2))));
        let other = text.replacen(FORMAT, "something", 1);
        assert!(matches!(BackupFile::read(&other), Err(FileError::Foreign(_))));
        let broken = text.replacen("orders", "or\u{1}ders", 1);
        assert!(matches!(BackupFile::read(&broken), Err(FileError::Line { line: 2, .. })));
    }
}
