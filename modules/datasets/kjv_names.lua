--- Names and numbers in the verses of the King James Bible, tagged word by word: persons, places, peoples, numbers.
--
--     local text = datasets.kjv_names.annotate("And Moses went up to Horeb", { ... })
--     text.tags                                       --> { "O", "B-person", "O", "O", "O", "B-place" }
--     local corpora = datasets.kjv_names.corpora()    -- verses to label and to test, text to read before
--
-- Labels come from lists of names and from rules about what stands around those of several kinds: Israel is a person
-- who speaks, a land that one is in, or a people that has elders. A verse with a name that no list has is no text of
-- this set. A quarter of the names, by their letters, is kept out of the training part, for a test of what is unseen.
local arguments = require "tycho.arguments"
local kjv = require "tycho.datasets.kjv"

local M = {}

--- What a word can be, for taggers.
M.classes = { "O", "B-number", "I-number", "B-person", "B-place", "B-people" }

-- ---- lists ----

local function set_of(text)
  local set = {}
  for word in text:gmatch "%S+" do set[word] = true end
  return set
end
local lists = {
  person = set_of [[David Moses Saul Jacob Aaron Solomon Pharaoh Joseph Abraham Joshua Joab Samuel Isaac Hezekiah
    Jonathan Absalom Jeroboam Ahab Jehoshaphat Eleazar Elijah Abimelech Balaam Abner Zedekiah Abram Asa Nebuchadnezzar
    Mordecai Jehu Elisha Esther Laban Haman Zadok Josiah Noah Jehoiada Rehoboam Azariah Joash Ishmael Jesse Rachel Balak
    Nathan Ahaz Benaiah Shimei Sarah Sarai Shemaiah Amaziah Gideon Samson Lot Ahaziah Jehoiakim Sihon Caleb Eli Leah
    Hilkiah Asaph Kohath Isaiah Gedaliah Abiathar Micah Adam Ahasuerus Rebekah Shaphan Nun Jephthah Joram Hananiah Uriah
    Amnon Baasha Uzziah Shallum Johanan Zeruiah Korah Ezra Adonijah Nebat Darius Benhadad Boaz Jotham Phinehas Tamar
    Jehoram Hazael Cyrus Jezebel Hiram Jehoahaz Machir Zerubbabel Og Nabal Naboth Kish Naomi Elkanah Achish Ithamar
    Eliab Sisera Ahithophel Ahikam Abijah Nadab Ahijah Cain Abel Zerah Amasa Abihu Ruth Hannah Hagar Bathsheba Michal
    Abigail Potiphar Jethro Deborah Barak Orpah Uzzah Ziba Mephibosheth Ishbosheth Hushai Ittai Doeg Dathan Abiram
    Bezaleel Seth Enoch Lamech Shem Ham Japheth Nahor Terah Bethuel Onan Shuah Miriam Zipporah Gershom Eliezer Merari
    Gershon Jeshua
    Nehemiah Tobiah Sanballat Athaliah Jehoiachin Menahem Pekah Omri Zimri Elah Gehazi Naaman Obadiah Abishai Asahel]],
  place = set_of [[Jerusalem Egypt Babylon Jordan Zion Samaria Assyria Gilead Canaan Syria Hebron Lebanon Bethel Jericho
    Shechem Damascus Bashan Gibeah Sodom Gomorrah Gilgal Seir Bethlehem Heshbon Gibeon Sinai Jezreel Ramah Beersheba
    Hamath Shiloh Gath Ai Carmel Arnon Lachish Mizpah Mizpeh Ekron Zidon Tyre Euphrates Bethshemesh Ashdod Ethiopia Eden
    Hazor Gaza Haran Ramothgilead Tirzah Mamre Gerar Goshen Rameses Succoth Horeb Kadesh Paran Zin Hormah Shittim Pisgah
    Nebo Hor Aroer Jabbok Machpelah Timnath Ophrah Keilah Ziklag Nob Adullam Engedi Jabesh Jabeshgilead Rabbah Geshur
    Zarephath Cherith Dothan Shushan Persia Media Ararat Shinar Padanaram Moriah Peniel Ephratah Zoar Endor Aphek
    Michmash Geba Anathoth Megiddo Taanach Bethhoron Makkedah Libnah Eglon Debir Kirjathjearim Ebal Gerizim Hermon]],
  people = set_of [[Levites Philistines Jews Egyptians Amorites Canaanites Syrians Chaldeans Hittites Jebusites
    Midianites Amalekites Ammonites Moabites Hebrews Perizzites Hivites Edomites Ishmeelites Gibeonites Benjamites
    Ephraimites Gileadites Reubenites Gadites Danites Kohathites Gershonites Zidonians Assyrians Ethiopians Israelites
    Girgashites Kenites Horites Anakims Rephaims Cherethites Pelethites Ziphites Archites Geshurites]],
}
--- Names that are of several kinds, as a set.
M.several = set_of [[Israel Judah Benjamin Ephraim Manasseh Reuben Gad Dan Asher Naphtali Levi Simeon Zebulun
  Issachar Moab Ammon Edom Midian Amalek]]
local numbers = set_of [[two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
  seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred thousand]]
local around = {
  person = { before = set_of "begat bare called son brother father wife daughter Now",
    after = set_of "said answered begat took called lifted blessed spake saw knew died loved" },
  place = { before = set_of "land in mount throughout coast border wilderness cities plains into from city king",
    after = set_of "" },
}

local kind_of = {}
for kind, set in pairs(lists) do for word in pairs(set) do kind_of[word] = kind end end
-- A quarter of the names, by their letters.
local function kept_back(word)
  local sum = 0
  for i = 1, #word do sum = sum * 31 + word:byte(i) end
  return kind_of[word] ~= nil and sum % 4 == 0
end

-- The kind of a name of several, by what stands around it. What stands before is looked for behind "of" and articles.
local function by_context(words, i)
  local before, after = words[i - 1] or "", words[i + 1] or ""
  if before == "of" then before = words[i - 2] or "" end
  for _, kind in ipairs { "person", "place" } do
    if around[kind].before[before] or around[kind].after[after] then return kind end
  end
  return "people"
end

local function words_of(verse)
  local words, starts, first = {}, {}, true
  for piece in verse:gmatch "%S+" do
    local word = piece:gsub("^%p+", ""):gsub("'s?%p*$", ""):gsub("%p+$", "")
    if word ~= "" then
      words[#words + 1], starts[#words + 1] = word, first
      first = piece:find "[%.%?%!:;,]%p*$" ~= nil
    end
  end
  return words, starts
end

--- A verse with tags: words without punctuation; starts (whether a word begins a sentence or a part of one); tags,
-- one a word; names, how many words have a tag; back, whether it has a name that is kept out of training. nil where
-- it has a name that nobody knows, or fewer than 4 or more than 45 words.
---@param verse string
---@param common table<string, boolean>  words that are no names though they begin a sentence, in small letters
---@return {words: string[], starts: boolean[], tags: string[], names: integer, back: boolean}?
function M.annotate(verse, common)
  arguments.expect("kjv_names.annotate", "verse", verse, "a string")
  arguments.expect("kjv_names.annotate", "common", common, "a table")
  local words, starts = words_of(verse)
  local text = { words = words, starts = starts, tags = {}, back = false, names = 0 }
  for i, word in ipairs(words) do
    local kind = kind_of[word] or M.several[word] and by_context(words, i)
    local joined = word == "and" and numbers[words[i - 1] or ""] and numbers[words[i + 1] or ""]
    if numbers[word] or joined then kind = "number" end
    local god = word == "God" or word == "Lord"
    if not kind and not god and word:find "^%u%l" and not common[word:lower()] then return nil end
    local inside = kind == "number" and (text.tags[i - 1] or ""):find "number$"
    text.tags[i] = kind and (inside and "I-" or "B-") .. kind or "O"
    text.back = text.back or kept_back(word)
    text.names = text.names + (kind and 1 or 0)
  end
  return #words >= 4 and #words <= 45 and text or nil
end

-- ---- text: other books, and the domain's chapters for adaptation, labels and tests ----

local domain = set_of "Genesis Exodus Numbers Joshua Judges Ruth"
for _, book in ipairs { "1 Samuel", "2 Samuel", "1 Kings", "2 Kings", "1 Chronicles", "2 Chronicles", "Ezra",
  "Nehemiah", "Esther", "Leviticus", "Deuteronomy" } do domain[book] = true end
local general = set_of [[Job Psalm Proverbs Ecclesiastes Matthew Mark Luke John Acts Romans Hebrews James Jude
  Galatians Ephesians Philippians Colossians Titus Philemon Revelation]]

--- Text by what it is for: general (chapters of poetry and of the New Testament, as texts), domain (chapters of
-- histories and laws, Genesis to Esther, without those of the test), training and testing (annotated verses of the
-- domain with at least one name: testing those of every fifth chapter, training those of the others without the
-- names kept back). options: every (1: every so many chapters, for a quick look).
---@param options? {every: integer}
---@return {general: string[], domain: string[], training: table[], testing: table[]}
function M.corpora(options)
  local o = arguments.read("kjv_names.corpora", options, { every = 1 }, { every = "an integer >= 1" })
  local chapters, common = {}, {}
  for _, split in ipairs { "training", "held_out" } do
    local set = kjv.load { split = split }
    for i = 0, #set - 1, o.every do
      local chapter = set:get(i)
      chapters[#chapters + 1] = chapter
      for _, verse in ipairs(chapter.verses) do for word in verse:gmatch "%f[%a]%l+" do common[word] = true end end
    end
  end
  local result, number = { general = {}, domain = {}, training = {}, testing = {} }, 0
  for _, chapter in ipairs(chapters) do
    if general[chapter.book] then table.insert(result.general, table.concat(chapter.verses, " ")) end
    if domain[chapter.book] then
      number = number + 1
      local test = number % 5 == 0
      if not test then table.insert(result.domain, table.concat(chapter.verses, " ")) end
      for _, verse in ipairs(chapter.verses) do
        local text = M.annotate(verse, common)
        if text and text.names > 0 and (test or not text.back) then
          table.insert(test and result.testing or result.training, text)
        end
      end
    end
  end
  return result
end

return M
