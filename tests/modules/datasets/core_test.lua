-- What all data sets share: the door, pages, sheets, checksums.
local here = (arg and arg[0]:match ".*/" or "tests/modules/datasets/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local scratch = dofile(here .. "scratch.lua")
local ty = require "tycho"
local datasets = require "tycho.datasets"

check.test("every set loads in each split that its page names, and has no other", function()
  local names = datasets.names()
  check.ok(#names >= 3)
  for _, name in ipairs(names) do
    local info = datasets.info(name)
    for _, row in ipairs { "title", "source", "licence", "made" } do check.ok(#info[row] > 0, name .. ": " .. row) end
    check.ok(info.splits.training, name .. " has a training part")
    for split, sentence in pairs(info.splits) do
      local set = datasets.load(name, { split = split })
      local count = sentence:match "^([%d,]+) %a" -- a sentence that begins with a count says the right one
      if count then check.equal(#set, tonumber((count:gsub(",", ""))), name .. " " .. split) end
      check.ok(#set > 0 and set:get(0), name .. " " .. split)
    end
    check.fails(function() datasets.load(name, { split = "no such part" }) end, ": split: ")
  end
end)

check.test("names that are not there", function()
  check.fails(function() datasets.load "emojy" end,
    'datasets.load: there is no data set "emojy"; did you mean emoji?; there are: ')
  check.fails(function() datasets.info "photo" end, 'datasets.info: there is no data set "photo"; did you mean photos?')
  check.fails(function() datasets.show(3) end, "datasets.show: name: expected a string, got 3")
  check.fails(function() datasets.path("photos", "sea.jpg") end, "the file datasets/photos/sea.jpg is missing")
  check.fails(function() datasets.path("photos") end, "datasets.path: file: expected a string, got nil")
end)

check.test("an empty set says that it is empty", function()
  for _, name in ipairs { "scenes", "clips", "arm", "volumes" } do
    local set = datasets.load(name, { length = 0 })
    check.equal(#set, 0)
    check.fails(function() set:batch { 0 } end, "the set is empty, got 0")
    check.fails(function() set:get(0) end, "the set is empty, got 0")
  end
end)

check.test("pixels and bytes: there and back, rounded and cut off", function()
  local all = ty.arange(256):to "u8"
  check.ok(datasets.bytes(datasets.pixels(all)):eq(all):all():item())
  check.close(datasets.pixels(ty.tensor({ 0, 255, 51 }, { dtype = "u8" })):tolist(), { -1, 1, -0.6 }, 1e-6)
  check.equal(datasets.bytes(ty.tensor { -3, -1, -0.999, 0.5, 1, 7 }):tolist(), { 0, 0, 0, 191, 255, 255 })
  check.equal(datasets.bytes(ty.tensor({ 0.5 }, { dtype = "f16", requires_grad = true })):tolist(), { 191 })
  check.fails(function() datasets.pixels(ty.ones(2)) end,
    "datasets.pixels: bytes: expected a tensor of u8, got one of f32")
  check.fails(function() datasets.bytes(all) end, "datasets.bytes: pixels: expected a tensor of floats, got one of u8")
  check.fails(function() datasets.bytes "x" end, 'datasets.bytes: pixels: expected a tensor of floats, got "x"')
end)

check.test("sheets", function()
  local path = scratch.file "sheet.png"
  check.equal(datasets.show("emoji", { path = path, count = 6, columns = 3, split = "held_out" }), path)
  local sheet = ty.io.load_image(path)
  check.equal(sheet.shape, { 3, 2 * (128 + 4 + 13) + 4, 3 * (128 + 4) + 4 })
  check.equal(datasets.show("emoji", { path = scratch.file "again.png", count = 6, columns = 3, split = "held_out" }),
    scratch.file "again.png")
  check.equal(scratch.slurp(path), scratch.slurp(scratch.file "again.png"), "the same items each time")
  datasets.show("emoji", { path = scratch.file "again.png", count = 6, columns = 3, split = "held_out", seed = 1 })
  check.ok(scratch.slurp(path) ~= scratch.slurp(scratch.file "again.png"), "others with another seed")
  local few = ty.io.load_image(datasets.show("digits", { path = scratch.file "digits.png", count = 4 }))
  check.equal(few.shape[3], 2 * (128 + 4) + 4)
  check.ok(few:max():item() == 255 and few:min():item() == 0)
  local captions = ty.io.load_image(
    datasets.show("scenes", { path = scratch.file "scenes.png", count = 5, columns = 5 }))
  check.ok(captions.shape[2] > 128 + 4 + 13 + 4, "long texts have several lines")
  check.fails(function() datasets.show("emoji", { path = "sheet.jpg" }) end,
    'datasets.show: path: expected the ending .png, got "sheet.jpg"')
  check.fails(function() datasets.show("emoji", { count = 0 }) end,
    "datasets.show: count: expected an integer >= 1, got 0")
end)

check.test("all that ships is listed with its checksum, and is small", function()
  local root, whole = check.root .. "datasets/", 0
  for _, name in ipairs(ty.io.listdir(root)) do
    local sums = ty.io.exists(root .. name .. "/checksums.json") and ty.io.load_json(root .. name .. "/checksums.json")
    for _, file in ipairs(ty.io.listdir(root .. name)) do
      local size = ty.io.stat(root .. name .. "/" .. file).size
      whole = whole + size
      check.ok(size < 20e6, file)
      local text = file:find "%.md$" or file:find "%.txt$" or file:find "^make" or file == "checksums.json"
      if not text then check.ok(sums and sums[file], ("%s/%s has a checksum"):format(name, file)) end
    end
    for file in pairs(sums or {}) do check.ok(datasets.path(name, file)) end
  end
  check.ok(whole < 40e6, "datasets/ is " .. whole .. " bytes")
end)

-- A folder of data of which a file was harmed, and what reading it says: in a process of its own, with TYCHO_DATA.
local function read_harmed(harm, code)
  local folder = scratch.file "data"
  os.execute(("rm -rf '%s' && mkdir -p '%s'"):format(folder, folder))
  os.execute(("cp -r '%sdatasets/digits' '%sdatasets/emoji' '%s'"):format(check.root, check.root, folder))
  harm(folder)
  local script = scratch.spit("read.lua", ([[
    local datasets = require "tycho.datasets"
    local ok, text = pcall(function() %s end)
    io.write(ok and "read" or text)
  ]]):format(code))
  os.execute(("TYCHO_DATA='%s' %s > '%s' 2>&1"):format(folder, scratch.program(script), scratch.file "said"))
  return scratch.slurp(scratch.file "said")
end

local function change(path, from, to)
  local text = scratch.slurp(path)
  local f = assert(io.open(path, "wb"))
  f:write(from and text:sub(1, from - 1) .. to .. text:sub(from + #to) or to)
  f:close()
end

check.test("a file that is missing, cut or changed is one clear error", function()
  local digits, emoji = 'datasets.load "digits"', 'datasets.load("emoji"):get(0)'
  local function says(text, wanted)
    local _, lines = text:gsub("\n", "\n")
    check.ok(text:find(wanted, 1, true) and lines == 0, ("%s\nwanted: %s"):format(text, wanted))
  end
  check.equal(read_harmed(function() end, digits), "read")
  says(read_harmed(function(folder) os.remove(folder .. "/digits/digits.npz") end, digits),
    "the file datasets/digits/digits.npz is missing: expected it in " .. scratch.file "data")
  says(read_harmed(function(folder) os.remove(folder .. "/emoji/en.json.gz") end, emoji),
    "the file datasets/emoji/en.json.gz is missing")
  local size = ty.io.stat(check.root .. "datasets/emoji/pictures.safetensors").size
  says(read_harmed(function(folder)
    local path = folder .. "/emoji/pictures.safetensors"
    change(path, nil, scratch.slurp(path):sub(1, -101))
  end, emoji), ("pictures.safetensors is not as it was written: expected bytes %d, got %d"):format(size, size - 100))
  says(read_harmed(function(folder) change(folder .. "/emoji/pictures.safetensors", 200000, "tycho") end, emoji),
    "pictures.safetensors is not as it was written: expected CRC-32 ")
  says(read_harmed(function(folder) change(folder .. "/digits/checksums.json", nil, "{") end, digits),
    "is damaged: checksums.json cannot be read")
  says(read_harmed(function(folder) change(folder .. "/emoji/README.md", nil, "# Emoji\n") end,
    'datasets.info "emoji"'), "README.md: expected a row 'source', found none")
  says(read_harmed(function(folder)
    change(folder .. "/emoji/README.md", nil, "# Emoji\n| source | x |\n| licence | x |\n| made | x |\n")
  end, 'datasets.info "emoji"'), "README.md: expected a row 'split NAME' for each split, found none")
end)

check.test("the scripts that make the files say which package is not there", function()
  if not os.execute "python3 -c '' 2>/dev/null" then return end
  for name, wanted in pairs {
    emoji = "NotoColorEmoji.ttf is not there: the Debian package fonts-noto-color-emoji has it",
    kjv = "the Debian packages bible-kjv and bible-kjv-text have the program and the text",
    photos = "the head of make.py says which packages have the photographs" } do
    local folder = scratch.file "make"
    os.execute(("rm -rf '%s' && cp -r '%sdatasets/%s' '%s'"):format(folder, check.root, name, folder))
    os.execute(("cd '%s' && python3 make.py /nowhere > '%s' 2>&1"):format(folder, scratch.file "said"))
    local said = scratch.slurp(scratch.file "said")
    check.ok(said:find(wanted, 1, true) and not said:find "Traceback", name .. ": " .. said)
  end
end)

os.execute(("rm -r '%s'"):format(scratch.folder))
check.finish()
