--- What tissues look like. ct: attenuation in thousandths of water's, at about 60 keV (Woodard and White 1986, "The
-- composition of body tissues", rounded), with the spread among people; mri: brightness as in a T1-weighted picture,
-- in thousandths of fat's.
local M = {
  fat = { ct = 905, mri = 1000, spread = 12, texture = 18, period = 24 },
  muscle = { ct = 1050, mri = 420, spread = 10, texture = 22, period = 20 },
  bone = { ct = 1750, mri = 130, spread = 120, texture = 120, period = 12 },
  marrow = { ct = 1240, mri = 720, spread = 60, texture = 90, period = 10 },
  disc = { ct = 1090, mri = 380, spread = 12, texture = 10, period = 12 },
  cord = { ct = 1030, mri = 330, spread = 6, texture = 6, period = 16 },
  mediastinum = { ct = 985, mri = 640, spread = 20, texture = 50, period = 22 },
  lung = { ct = 250, mri = 60, spread = 40, texture = 70, period = 22 },
  air = { ct = 1, mri = 5, spread = 0, texture = 0, period = 20 },
  heart = { ct = 1052, mri = 400, spread = 8, texture = 16, period = 18 },
  blood = { ct = 1056, mri = 160, spread = 6, texture = 6, period = 16 },
  liver = { ct = 1062, mri = 560, spread = 10, texture = 22, period = 16 },
  spleen = { ct = 1050, mri = 360, spread = 8, texture = 16, period = 16 },
  nodule = { ct = 1130, mri = 390, spread = 25, texture = 20, period = 8 },
  cyst = { ct = 1004, mri = 190, spread = 3, texture = 4, period = 16 },
  calcification = { ct = 1900, mri = 40, spread = 200, texture = 80, period = 8 },
  fluid = { ct = 1015, mri = 210, spread = 5, texture = 6, period = 16 },
  void = { ct = 1020, mri = 470, spread = 8, texture = 14, period = 20 },
}

--- The contrasts.
M.contrasts = { "ct", "mri" }

return M
