-- Finding names in a domain that the encoder was not trained for
-- claim: after reading unlabelled text of the domain, LoRA with fewer than 1.5 % of the parameters finds more entities
--   than without that, at a fraction of what full fine-tuning holds
-- system: a small ModernBERT trained here on a third of the Bible, adapted to its histories; four kinds of entities
-- paper: Panahi 2025, "OpenMed NER: Open-Source, Domain-Adapted State-of-the-Art Transformers for Biomedical NER Across
--   12 Public Datasets"
-- time: 4 minutes on one CPU core
--
-- The encoder is trained by the masked objective on poetry and the New Testament; its domain are the histories and
-- laws, Genesis to Esther, where other names stand. It goes on for a while with the chapters there that are not tested
-- on (domain-adaptive pre-training), or not; then 120 labelled verses teach to tag words, by LoRA on query, key and
-- value and a head, by the head alone, or by all parameters. Rates are chosen by verses for development, the same
-- number of tries each. Labels come from lists of names and from rules about what stands around them: Israel is a
-- person who speaks, a land that one is in, or a people that has elders; verses with names that no list has are left
-- out. A quarter of the names are in no labelled verse: what is unseen counts apart, as do names of several kinds. The
-- gazetteer knows every labelled word's commonest tag, and takes other words with a capital that does not begin a
-- sentence for persons: with names that come again and again in one book it is hard to beat, and at this size of
-- encoder the taggers stay behind it, with all parameters too; tried were 60 to 200 steps, 120 and 240 verses, and
-- rates to both sides. F1 is of exact spans; differences between ways are those of three seeds, each with its own
-- adaptation, labelled verses and adapters.
local ty = require "tycho"
local datasets = require "tycho.datasets"
local llm, models, peft = require "tycho.llm", require "tycho.models", require "tycho.peft"

local r = ty.recipe.declare {
  seeds = 3,
  args = {
    { "base", 700, "steps of training the encoder", quick = 2 },
    { "adapt", 200, "steps of adapting it to the domain", quick = 2 },
    { "steps", 100, "of training taggers", quick = 2 },
    { "labelled", 120, "verses", quick = 8 },
    { "tested", 400, "verses", quick = 8 },
    { "width", 96, "hidden size", quick = 32 },
    { "layers", 3, "of the encoder", quick = 1 },
    { "rank", 4, "of LoRA" },
  },
}
local args = r.args

-- ---- labels ----

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
    Eliab
    Sisera Ahithophel Ahikam Abijah Nadab Ahijah Cain Abel Zerah Amasa Abihu Ruth Hannah Hagar Bathsheba Michal Abigail
    Potiphar Jethro Deborah Barak Orpah Uzzah Ziba Mephibosheth Ishbosheth Hushai Ittai Doeg Dathan Abiram Bezaleel Seth
    Enoch Lamech Shem Ham Japheth Nahor Terah Bethuel Onan Shuah Miriam Zipporah Gershom Eliezer Merari Gershon Jeshua
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
local several = set_of [[Israel Judah Benjamin Ephraim Manasseh Reuben Gad Dan Asher Naphtali Levi Simeon Zebulun
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

-- A verse with tags; nil where it has a name that nobody knows.
local common = {}
local function annotate(verse)
  local words, starts = words_of(verse)
  local text = { words = words, starts = starts, tags = {}, back = false, names = 0 }
  for i, word in ipairs(words) do
    local kind = kind_of[word] or several[word] and by_context(words, i)
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
local general_books = set_of [[Job Psalm Proverbs Ecclesiastes Matthew Mark Luke John Acts Romans Hebrews James Jude
  Galatians Ephesians Philippians Colossians Titus Philemon Revelation]]
local general, adapting, training, testing = {}, {}, {}, {}
local chapters = {}
for _, split in ipairs { "training", "held_out" } do
  local set = datasets.load("kjv", { split = split })
  for i = 0, #set - 1, r.quick and 6 or 1 do
    local chapter = set:get(i)
    chapters[#chapters + 1] = chapter
    for _, verse in ipairs(chapter.verses) do for word in verse:gmatch "%f[%a]%l+" do common[word] = true end end
  end
end
local number = 0
for _, chapter in ipairs(chapters) do
  if general_books[chapter.book] then
    general[#general + 1] = table.concat(chapter.verses, " ")
  elseif domain[chapter.book] then
    number = number + 1
    local test = number % 5 == 0
    if not test then adapting[#adapting + 1] = table.concat(chapter.verses, " ") end
    for _, verse in ipairs(chapter.verses) do
      local text = annotate(verse)
      if text and text.names > 0 and (test or not text.back) then table.insert(test and testing or training, text) end
    end
  end
end

local tokenizer = ty.tokenizer.train(general, { vocabulary = r.quick and 400 or 1000 })
local mask, pad, length = tokenizer.size, tokenizer.size + 1, 48
local function rows_of(texts)
  local ids = tokenizer:encode(table.concat(texts, " ")):to "i64"
  local n = ids:numel() // length
  return ids:narrow(0, 0, n * length):reshape(n, length)
end
local general_rows, domain_rows = rows_of(general), rows_of(adapting)
local objective = { mask = mask, vocabulary = tokenizer.size, share = 0.3 } -- more to learn from in few steps
local function with(options)
  for key, value in pairs(objective) do options[key] = value end
  return options
end

-- ---- encoders ----

ty.manual_seed(r.seed)
local base = models.ModernBertForMaskedLM { vocab_size = tokenizer.size + 2, hidden_size = args.width,
  num_hidden_layers = args.layers, num_attention_heads = args.width // 32, intermediate_size = 2 * args.width,
  max_position_embeddings = 128, pad_token_id = pad, initializer_range = 0.05, global_rope_theta = 10000 }
local since = ty.system.clock()
llm.masking.fit(base, general_rows, with { steps = args.base, lr = 5e-3, batch = r.quick and 4 or 32 })
local probe = domain_rows:narrow(0, domain_rows.shape[1] - (r.quick and 4 or 100), r.quick and 4 or 100)
local seen = domain_rows:narrow(0, 0, domain_rows.shape[1] - probe.shape[1])
r:say("encoder of %d parameters, %.0f s; masked loss %.3f on the domain; %d verses to label, %d to test",
  base:count_parameters(), ty.system.clock() - since, llm.masking.evaluate(base, probe, with {}).loss, #training,
  #testing)

local function draw(list, count)
  local order, picked = ty.randperm(#list):tolist(), {}
  for i = 1, math.min(count, #list) do picked[i] = list[order[i] + 1] end
  return picked
end

local classes = { "O", "B-number", "I-number" }
for _, kind in ipairs { "person", "place", "people" } do classes[#classes + 1] = "B-" .. kind end

local function tags_of(texts)
  local list = {}
  for i, text in ipairs(texts) do list[i] = text.tags end
  return list
end

local function count(list)
  local sum = 0
  for _, p in ipairs(list) do sum = sum + p:numel() end
  return sum
end

-- Trains a tagger on an encoder's copy; how: "lora", "head" or "full". Returns it and what it took.
local function train_tagger(encoder, how, rate, material, seed)
  ty.manual_seed(seed)
  local tagger = peft.token_classification.new(encoder:clone(), classes, { pad = pad })
  local trained = tagger:parameters()
  local all = count(trained)
  if how ~= "full" then
    trained = {}
    if how == "lora" then
      peft.lora(tagger.encoder, { targets = { "Wqkv" }, rank = args.rank, alpha = 4 * args.rank })
      trained = peft.parameters(tagger.encoder)
    else
      for _, p in ipairs(tagger.encoder:parameters()) do p:requires_grad_(false) end
    end
    for _, p in ipairs(tagger.classifier:parameters()) do trained[#trained + 1] = p end
  end
  local opt = ty.optim.AdamW(trained, { lr = rate, weight_decay = 0.01, clip_norm = 1,
    schedule = ty.optim.linear { steps = args.steps, warmup = args.steps // 10 } })
  local from = ty.system.clock()
  for _ = 1, args.steps do
    ty.scope(function() opt:step(tagger:loss(tagger:batch(tokenizer, draw(material, r.quick and 2 or 12)))) end)
  end
  return tagger, { trained = count(trained), share = count(trained) / all, seconds = ty.system.clock() - from,
    held = 4 * count(trained) + opt:state_bytes() } -- gradients and moments
end

local known -- words of labelled verses, by text
local function scores(texts, predicted)
  local gold = tags_of(texts)
  local function only(test)
    return function(span, i) return span.kind ~= "number" and test(texts[i].words[span.first]) end
  end
  return { all = llm.spans.score(gold, predicted).f1,
    unseen = llm.spans.score(gold, predicted, only(function(word) return not known[word] end)).f1,
    several = llm.spans.score(gold, predicted, only(function(word) return several[word] end)).f1 }
end

-- What one has without a model: every word's commonest tag, and a rule about capitals.
local function gazetteer(material, texts)
  local counts, lists_of = {}, {}
  for _, text in ipairs(material) do
    for i, word in ipairs(text.words) do
      counts[word] = counts[word] or {}
      counts[word][text.tags[i]] = (counts[word][text.tags[i]] or 0) + 1
    end
  end
  for i, text in ipairs(texts) do
    lists_of[i] = {}
    for k, word in ipairs(text.words) do
      local best, most = (not text.starts[k] and word:find "^%u%l") and "B-person" or "O", 0
      for tag, n in pairs(counts[word] or {}) do if n > most then best, most = tag, n end end
      lists_of[i][k] = best
    end
  end
  return lists_of
end

local ways = {
  { name = "LoRA, adapted", how = "lora", adapted = true, rates = { 1e-2, 3e-2 } },
  { name = "LoRA, not adapted", how = "lora", rates = { 1e-2, 3e-2 } },
  { name = "head alone, adapted", how = "head", adapted = true, rates = { 2e-2, 6e-2 } },
  { name = "full, adapted", how = "full", adapted = true, rates = { 1.5e-3, 4e-3 } },
}
local found, spent = { gazetteer = {} }, {}
for _, way in ipairs(ways) do found[way.name] = {} end
for i, seed in ipairs(r.seeds) do
  ty.manual_seed(seed + 10)
  local adapted = base:clone()
  local from = ty.system.clock()
  llm.masking.fit(adapted, seen, with { steps = args.adapt, lr = 3e-3, batch = r.quick and 4 or 32, seed = seed })
  local seconds = ty.system.clock() - from
  local drawn = draw(training, 2 * args.labelled)
  local material = table.move(drawn, 1, #drawn // 2, 1, {})
  local development = table.move(drawn, #drawn // 2 + 1, #drawn, 1, {})
  local tests = draw(testing, args.tested)
  known = {}
  for _, text in ipairs(material) do for _, word in ipairs(text.words) do known[word] = true end end
  found.gazetteer[i] = scores(tests, gazetteer(material, tests))
  r:say("seed %d: adapted in %.1f s, masked loss %.3f; gazetteer: F1 %.3f, unseen %.3f, of several kinds %.3f", seed,
    seconds, llm.masking.evaluate(adapted, probe, with {}).loss, found.gazetteer[i].all, found.gazetteer[i].unseen,
    found.gazetteer[i].several)
  for _, way in ipairs(ways) do
    local encoder = (way.adapted and adapted or base).model
    if not way.rate then
      local least
      for _, rate in ipairs(r.quick and { way.rates[1] } or way.rates) do
        local tagger = train_tagger(encoder, way.how, rate, material, seed)
        local f1 = scores(development, tagger:tags(tokenizer, development)).all
        if not least or f1 > least then least, way.rate = f1, rate end
      end
    end
    local tagger, took = train_tagger(encoder, way.how, way.rate, material, seed)
    local predicted = tagger:tags(tokenizer, tests)
    local score = scores(tests, predicted)
    found[way.name][i], spent[way.name] = score, took
    r:say("  %s, rate %g: F1 %.3f, unseen names %.3f, of several kinds %.3f; %d parameters, %.2f %%, %.1f s", way.name,
      way.rate, score.all, score.unseen, score.several, took.trained, 100 * took.share, took.seconds)
    for key, value in pairs(score) do r.metrics[("%s/%s/%d"):format(way.name, key, seed)] = value end
    if i == 1 and way.name == "LoRA, adapted" then
      for k = 1, math.min(3, #tests) do
        local line = {}
        for w, word in ipairs(tests[k].words) do
          local gold, got = tests[k].tags[w], predicted[k][w]
          line[w] = got == gold and (gold == "O" and word or ("%s[%s]"):format(word, gold:sub(3)))
            or ("%s[%s, not %s]"):format(word, gold, got)
        end
        r:say("  %s", table.concat(line, " "))
      end
    end
  end
end

local function column(name, key)
  local list = {}
  for i, score in ipairs(found[name]) do list[i] = score[key] end
  return list
end
local function less(a, b, key)
  local list = {}
  for i, value in ipairs(column(a, key)) do list[i] = value - column(b, key)[i] end
  return list
end
local series = {}
for _, name in ipairs { "LoRA, adapted", "LoRA, not adapted", "head alone, adapted", "full, adapted", "gazetteer" } do
  series[#series + 1] = { x = { 1, 2, 3 }, label = name, y = { ty.stats.mean(column(name, "all")),
    ty.stats.mean(column(name, "unseen")), ty.stats.mean(column(name, "several")) } }
end
ty.plot.line { series = series, title = "F1 of exact spans", x_label = "1 all, 2 unseen, 3 several kinds",
  y_label = "F1", width = 640, height = 400 }:save(r:picture "ner-lora.png")

local ours = "LoRA, adapted"
local memory = spent[ours].held / spent["full, adapted"].held
os.exit(r:finish {
  { claim = "F1 of LoRA after adaptation, less without", values = less(ours, "LoRA, not adapted", "all"),
    baseline = column("LoRA, not adapted", "all"), bar = 0 },
  { claim = "the same of names that no labelled verse had", values = less(ours, "LoRA, not adapted", "unseen"),
    baseline = column("LoRA, not adapted", "unseen"), bar = 0 },
  { claim = "F1 of it, less that of the gazetteer", values = less(ours, "gazetteer", "all"),
    baseline = column("gazetteer", "all"), bar = 0 },
  { claim = "share of the parameters that it trains", measured = spent[ours].share, bar = 0.015, below = true },
  { claim = "bytes of its gradients and moments, of those of full fine-tuning", measured = memory, bar = 0.015,
    below = true },
}, true)
